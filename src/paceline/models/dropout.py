"""Dropout that is drawn per sample: the same for a sample on any rank, in any microbatch or lane, on CPU and GPU.

A training step gives each sample a key (training/sample_keys.py). A layer hashes the key with its own number and the
number of the feature, with the hash that also draws the augmentation (data/draws.py). There is no generator state, and
these are plain tensor operations, so they compile, and a recording replays them with other keys. A pass that is
computed again (activation checkpointing) draws the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.data.draws import draw_sequence

_VALUES = 2**16  # of one draw. Four draws come from one hash of 64 bits, so a hash costs a quarter.
_DRAWS_PER_HASH = 4
_HASHES_PER_LAYER = 2**32


class SampleKeys:
    """The keys of the samples that go through the model now. All dropout layers of a model read the same object."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None  # int64, one per sample


class SampleDropout(nn.Dropout):
    """`nn.Dropout` whose mask depends on the sample, the step and the layer, and on nothing else.

    The first dimension of its input is the batch. Use one layer in one place: two passes of one layer draw the same
    mask. Without keys, as outside of a training step, it is `nn.Dropout`.
    """

    source: SampleKeys | None = None
    layer = 0  # keeps the draws of a model's layers apart

    def forward(self, input: Tensor) -> Tensor:
        keys = self.source.keys if self.source is not None else None
        if not self.training or keys is None or self.p in (0, 1):
            return super().forward(input)
        kept = draw_kept(input.shape, self.p, keys, self.layer)
        factor = 1 / (1 - dropped_share(self.p))  # keeps the mean
        if input.dtype.itemsize < 4:  # half precision would round the factor
            return input * kept * factor
        return input * kept.to(input.dtype).mul_(factor)


def draw_kept(shape: torch.Size, p: float, keys: Tensor, layer: int) -> Tensor:
    """Whether each value is kept."""
    assert len(keys) == shape[0], f"{len(keys)} keys for {shape[0]} samples"
    features = shape[1:].numel()
    first = layer * _HASHES_PER_LAYER
    hashes = torch.arange(first, first + -(-features // _DRAWS_PER_HASH), device=keys.device)
    draws = draw_sequence(keys[:, None], hashes).view(torch.int16)[:, :features]
    return (draws >= round(dropped_share(p) * _VALUES) - _VALUES // 2).view(shape)


def dropped_share(p: float) -> float:
    """The part of all values of a draw that stands for "dropped"; never all of them."""
    return min(round(p * _VALUES), _VALUES - 1) / _VALUES


def share_keys(model: nn.Module) -> SampleKeys | None:
    """Number a model's dropout layers and let all of them read one source. None if it has no such layer."""
    layers = [layer for layer in model.modules() if isinstance(layer, SampleDropout)]
    source = SampleKeys()
    for number, layer in enumerate(layers):
        layer.source, layer.layer = source, number
    return source if any(layer.p > 0 for layer in layers) else None
