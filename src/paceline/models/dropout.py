"""Dropout that is drawn per sample: a sample gets the same mask on any rank, in any microbatch or lane, on CPU and GPU.

A training step gives each sample a key (`ShareKeys`): a hash of (seed, step, position in the global batch). Ranks have
neighbouring shares of the global batch, so the position follows from the rank and the place in its share, however the
batch is cut into ranks, lanes and microbatches. A layer hashes the key, its own number and the number of the feature,
with the hash that also draws the augmentation (data/draws.py). There is no generator state.
On a GPU all operations are plain tensor operations: they compile, and a CUDA graph replays them with other keys. On a
CPU numpy computes the same bits in less time. A pass that is computed again (activation checkpointing) draws the same
mask.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.draws import draw_bits_from, draw_sequence, draw_sequence_on_host, later_start, start_of

_VALUES = 2**16  # of one draw. One hash of 64 bits gives four draws, which saves three hashes.
_DRAWS_PER_HASH = 4
_HASHES_PER_LAYER = 2**32
_LAYERS = 20  # keeps these draws apart from those of order and augmentation
_STEPS_AT_ONCE = 32  # drawn together: for one step the small tensor operations would take longer than the hashing
# What the random numbers of a run depend on. Part of a checkpoint, so that a resume can say that they have changed.
# 1: dropout is drawn per rank. 2: dropout of our own models is drawn per sample.
RANDOM_NUMBERS = 2


class SampleKeys:
    """The keys of the samples in the current pass. All dropout layers of a model read the same object."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None  # int64, one per sample


class SampleDropout(nn.Dropout):
    """`nn.Dropout` whose mask depends only on the sample, the step and the layer.

    The first dimension of its input is the batch. Use each layer once per pass: a second use draws the same mask.
    Without keys, as outside of a training step, it is `nn.Dropout`.
    """

    source: SampleKeys | None = None
    layer = 0  # part of the hash, so the layers of a model draw different masks

    def forward(self, input: Tensor) -> Tensor:
        keys = self.source.keys if self.source is not None else None
        if not self.training or keys is None or self.p in (0, 1):
            return super().forward(input)
        kept = draw_kept(input.shape, self.p, keys, self.layer)
        factor = 1 / (1 - dropped_share(self.p))  # keeps the mean
        if input.dtype.itemsize < 4:  # half precision would round the factor
            return input * kept * factor
        return input * kept.to(input.dtype).mul_(factor)


class SampleDropPath(SampleDropout):
    """Drops the whole output of a branch for some samples (stochastic depth). Drawn like `SampleDropout`."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        ones = input.new_ones(len(input), *[1] * (input.dim() - 1))
        return input * super().forward(ones)


def draw_kept(shape: torch.Size, p: float, keys: Tensor, layer: int) -> Tensor:
    """A boolean mask: True where a value is kept."""
    assert len(keys) == shape[0], f"{len(keys)} keys for {shape[0]} samples"
    features = shape[1:].numel()
    first = layer * _HASHES_PER_LAYER
    hashes = -(-features // _DRAWS_PER_HASH)
    limit = round(dropped_share(p) * _VALUES) - _VALUES // 2
    if keys.device.type == "cpu" and not torch.compiler.is_compiling():
        draws = draw_sequence_on_host(keys, first, hashes).view(np.int16)
        return torch.from_numpy(draws[:, :features] >= limit).view(shape)
    # A compiled kernel computes a range, and sums and products with it, as an index of 32 bits, which cannot hold our
    # constants. The exclusive or, which changes nothing, makes it a tensor of 64 bits.
    numbers = torch.arange(hashes, device=keys.device) ^ 0
    drawn = draw_sequence(later_start(keys, first)[:, None], numbers)
    return (drawn.view(torch.int16)[:, :features] >= limit).view(shape)


def dropped_share(p: float) -> float:
    """The fraction of draw values that means "dropped"; always below one."""
    return min(round(p * _VALUES), _VALUES - 1) / _VALUES


def share_keys(model: nn.Module) -> SampleKeys | None:
    """Number a model's dropout layers and give all of them the same `SampleKeys`. None if it has no such layer."""
    layers = [layer for layer in model.modules() if isinstance(layer, SampleDropout)]
    source = SampleKeys()
    for number, layer in enumerate(layers):
        layer.source, layer.layer = source, number
    return source if any(layer.p > 0 for layer in layers) else None


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
