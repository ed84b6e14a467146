# hint: digits-run-together
# Digits that overlap: epoch 10 of one seed is epoch 0 of the next one.
"""Lesson 11: augmentation. Fill the gaps, then: paceline course check 11

Pictures are [channels, 10, 10], the model takes 8x8. Every random choice is a function of seed, epoch and sample.
"""

import hashlib

import torch
from torch import Tensor

ROW, COLUMN, FLIP, MIX = range(4)  # the number of each random choice


def uniform(seed: int, epoch: int, sample: int, choice: int) -> float:
    """A random number from 0 to 1 that depends on these four numbers and on nothing else."""
    key = str(seed * 1000 + epoch * 100 + sample * 10 + choice)
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def augment(image: Tensor, seed: int, epoch: int, sample: int) -> Tensor:
    """Cut 8x8 out of a picture, from row and column 0, 1 or 2 on; then flip it if the draw is below 0.5."""
    row = int(uniform(seed, epoch, sample, ROW) * 3)
    column = int(uniform(seed, epoch, sample, COLUMN) * 3)
    part = image[:, row : row + 8, column : column + 8]
    return part.flip(-1) if uniform(seed, epoch, sample, FLIP) < 0.5 else part


def augmented_share(
    images: Tensor, batch: list[int], rank: int, world_size: int, seed: int, epoch: int
) -> tuple[list[int], Tensor]:
    """This rank's neighbouring part of a global batch: the samples, and their augmented pictures."""
    size = len(batch) // world_size
    samples = batch[rank * size : (rank + 1) * size]
    return samples, torch.stack([augment(images[sample], seed, epoch, sample) for sample in samples])


def mixup(inputs: Tensor, targets: Tensor, samples: list[int], seed: int, epoch: int) -> tuple[Tensor, Tensor]:
    """Mix each sample with its neighbour, 0 with 1 and 2 with 3. The draw of a sample is the share of itself."""
    partner = torch.arange(len(samples)) ^ 1
    share = torch.tensor([uniform(seed, epoch, sample, MIX) for sample in samples])
    pixels, labels = share[:, None, None, None], share[:, None]
    return torch.lerp(inputs[partner], inputs, pixels), torch.lerp(targets[partner], targets, labels)
