"""Lesson 11: augmentation. Fill the gaps, then: paceline course check 11

Pictures are [channels, 10, 10], the model takes 8x8. Every random choice is a function of seed, epoch and sample.
"""

import hashlib

import torch
from torch import Tensor

ROW, COLUMN, FLIP, MIX = range(4)  # the number of each random choice


def uniform(seed: int, epoch: int, sample: int, choice: int) -> float:
    """A random number from 0 to 1 that depends on these four numbers and on nothing else."""
    key = ...  # TODO: a text with all four numbers; other numbers must give another text
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def augment(image: Tensor, seed: int, epoch: int, sample: int) -> Tensor:
    """Cut 8x8 out of a picture, from row and column 0, 1 or 2 on; then flip it if the draw is below 0.5."""
    row = ...  # TODO: 0, 1 or 2
    column = ...  # TODO
    part = image[:, row : row + 8, column : column + 8]
    return ...  # TODO: part.flip(-1) is the flipped part


def augmented_share(
    images: Tensor, batch: list[int], rank: int, world_size: int, seed: int, epoch: int
) -> tuple[list[int], Tensor]:
    """This rank's neighbouring part of a global batch: the samples, and their augmented pictures."""
    size = len(batch) // world_size
    samples = batch[rank * size : (rank + 1) * size]
    return samples, torch.stack([...])  # TODO: augment each picture; what is its key on any number of ranks?


def mixup(inputs: Tensor, targets: Tensor, samples: list[int], seed: int, epoch: int) -> tuple[Tensor, Tensor]:
    """Mix each sample with its neighbour, 0 with 1 and 2 with 3. The draw of a sample is the share of itself."""
    partner = ...  # TODO: a tensor: 1, 0, 3, 2, ...
    share = ...  # TODO: a tensor: the draw of each sample
    pixels, labels = share[:, None, None, None], share[:, None]
    return torch.lerp(inputs[partner], inputs, pixels), ...  # TODO: the targets, mixed in the same way
