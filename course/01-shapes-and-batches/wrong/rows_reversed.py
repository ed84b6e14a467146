# hint: pictures-exchanged
# Whole pictures, the last one first.
"""Lesson 1: shapes and batches. Fill the gaps, then: paceline course check 1"""

from torch import Tensor


def flatten(images: Tensor) -> Tensor:
    """Pictures (batch, channels, height, width) become rows (batch, features)."""
    return images.flip(0).reshape(images.shape[0], -1)


def rank_batch_size(global_batch_size: int, world_size: int) -> int:
    """The number of samples of each global batch for one rank. A batch that cannot be divided equally is an error."""
    if global_batch_size % world_size:
        raise ValueError(f"{global_batch_size} samples cannot be shared equally by {world_size} ranks")
    return global_batch_size // world_size


def scaled_learning_rate(base_lr: float, global_batch_size: int) -> float:
    """`base_lr` is for a global batch of 256; the learning rate is proportional to the global batch."""
    return base_lr * global_batch_size / 256


def rank_share(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """This rank's rows of a global batch: neighbouring rows, so that all shares in order form the batch."""
    size = rank_batch_size(batch.shape[0], world_size)
    return batch[rank * size : (rank + 1) * size]
