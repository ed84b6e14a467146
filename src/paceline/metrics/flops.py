"""Count the floating-point operations of a training step: matrix products and convolutions, forward and backward.

A copy of the model is built on the meta device, where tensors have shapes and no data. Nothing is computed. The run's
weights, statistics and random numbers do not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from paceline.models.registry import build_model
from paceline.settings.schema import ModelConfig

_SAMPLES = 2  # BatchNorm cannot train on one
_MOST_WORDS = 120


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of forward and backward; None and the reason if they cannot be counted."""

    per_sample: int | None
    note: str = ""


def count_flops(config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> FlopCount:
    """The cost grows linearly with the number of samples, so a few samples give the cost of each."""
    try:
        total = _count_on("meta", config, input_shape, num_classes)
    except Exception:  # a user's model may read tensor values, which the meta device does not have
        try:
            with torch.random.fork_rng(devices=[]):
                total = _count_on("cpu", config, input_shape, num_classes)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            return FlopCount(None, f"this model's arithmetic cannot be counted ({reason[:_MOST_WORDS]})")
    if not total:
        return FlopCount(None, "this model has no matrix product or convolution to count")
    return FlopCount(total // _SAMPLES)


def _count_on(device: str, config: ModelConfig, input_shape: tuple[int, ...], num_classes: int) -> int:
    # Imported here: the import takes half a second.
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device(device):
        model = build_model(config, input_shape, num_classes, load_weights=False).train()
        inputs = torch.zeros(_SAMPLES, *input_shape)
        answers = torch.zeros(_SAMPLES, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(inputs), answers).backward()
    return int(counter.get_total_flops())
