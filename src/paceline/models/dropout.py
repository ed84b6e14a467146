"""Dropout that is drawn per sample: the same for a sample on any rank, in any microbatch or lane, on CPU and GPU.

A training step gives each sample a key (training/sample_keys.py). A layer hashes the key with its own number and the
number of the feature, with the hash that also draws the augmentation (data/draws.py). There is no generator state, and
these are plain tensor operations, so they compile, and a recording replays them with other keys. A pass that is
computed again (activation checkpointing) draws the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.data.draws import draw_bits_from

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
        return input * draw_mask(input, self.p, keys, self.layer)


def draw_mask(inputs: Tensor, p: float, keys: Tensor, layer: int) -> Tensor:
    """0 for each value that is dropped, and for the others what keeps the mean: 1 / (1 - p)."""
    assert len(keys) == len(inputs), f"{len(keys)} keys for {len(inputs)} samples"
    features = inputs.shape[1:].numel()
    hashes = torch.arange(-(-features // _DRAWS_PER_HASH), device=keys.device) + layer * _HASHES_PER_LAYER
    draws = draw_bits_from(hashes, keys[:, None]).view(torch.int16)[:, :features]
    dropped = min(round(p * _VALUES), _VALUES - 1)  # of all values of a draw
    kept = draws >= dropped - _VALUES // 2
    return kept.to(inputs.dtype).mul_(_VALUES / (_VALUES - dropped)).view(inputs.shape)


def share_keys(model: nn.Module) -> SampleKeys | None:
    """Number a model's dropout layers and let all of them read one source. None if it has no such layer."""
    layers = [layer for layer in model.modules() if isinstance(layer, SampleDropout)]
    source = SampleKeys()
    for number, layer in enumerate(layers):
        layer.source, layer.layer = source, number
    return source if any(layer.p > 0 for layer in layers) else None
