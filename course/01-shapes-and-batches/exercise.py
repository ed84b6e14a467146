"""Lesson 1: shapes and batches. Fill the gaps, then: paceline course check 1"""

from torch import Tensor


def flatten(images: Tensor) -> Tensor:
    """Pictures (batch, channels, height, width) become rows (batch, features)."""
    return ...  # TODO: one row per picture, for any number of pictures


def rank_batch_size(global_batch_size: int, world_size: int) -> int:
    """The number of samples of each global batch for one rank. A batch that cannot be divided equally is an error."""
    ...  # TODO: raise ValueError if the shares would be unequal; else return the share


def scaled_learning_rate(base_lr: float, global_batch_size: int) -> float:
    """`base_lr` is for a global batch of 256; the learning rate is proportional to the global batch."""
    return ...  # TODO


def rank_share(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """This rank's rows of a global batch: neighbouring rows, so that all shares in order form the batch."""
    size = rank_batch_size(batch.shape[0], world_size)
    return ...  # TODO: rank 0 has the first rows, rank 1 those after them, and so on
