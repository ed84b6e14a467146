"""A key for each sample of a step, from which layers draw: a hash of (seed, step, position in the global batch).

Ranks have neighbouring shares of the global batch, so a sample's position follows from its rank and its place in the
share. The key does not depend on how the batch is cut into ranks, lanes or microbatches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.data.draws import draw_bits_from, start_of

_LAYERS = 20  # keeps these draws apart from those of order and augmentation
_STEPS_AT_ONCE = 32  # drawn together: for one step the small tensor operations would take longer than the hashing

# What the random numbers of a run depend on. Part of a checkpoint, so that a resume can say that they have changed.
# 1: dropout is drawn per rank. 2: dropout of our own models is drawn per sample.
RANDOM_NUMBERS = 2


class ShareKeys:
    """The keys of one rank's share of the global batch."""

    def __init__(self, seed: int, rank: int, device: str) -> None:
        self._seed = seed
        self._rank = rank
        self._device = device
        self._drawn = (-1, 0)  # which steps, and how many samples of each
        self._keys: tuple[Tensor, ...] = ()

    def of(self, step: int, samples: int) -> Tensor:
        """The keys of a step's samples, in the order of the share."""
        block, place = divmod(step, _STEPS_AT_ONCE)
        if self._drawn != (block, samples):
            first = block * _STEPS_AT_ONCE
            starts = [start_of(_LAYERS, self._seed, number) for number in range(first, first + _STEPS_AT_ONCE)]
            positions = torch.arange(self._rank * samples, (self._rank + 1) * samples, device=self._device)
            self._keys = draw_bits_from(positions, torch.tensor(starts, device=self._device)[:, None]).unbind()
            self._drawn = block, samples
        return self._keys[place]
