"""The learning rate as a pure function of the step: nothing to save, nothing to step twice."""

from __future__ import annotations

import math

from paceline.settings.schema import OptimConfig

REFERENCE_BATCH = 256
_ONECYCLE_START = 1 / 25  # of the peak
_ONECYCLE_RISE = 0.3  # of the run, unless warm-up says otherwise


def peak_learning_rate(config: OptimConfig, global_batch_size: int) -> float:
    """Linear scaling: twice the batch, twice the rate. Muon's updates have one size, whatever the batch."""
    if config.optimizer == "muon":
        return config.base_lr
    return config.base_lr * global_batch_size / REFERENCE_BATCH


def learning_rate(step: int, *, config: OptimConfig, peak: float, steps_per_epoch: int, total_steps: int) -> float:
    """The rate for the update that ends step number `step` (counted from 0)."""
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if config.schedule == "onecycle":
        rise = warmup or max(1, round(_ONECYCLE_RISE * total_steps))
        if step < rise:
            return peak * (_ONECYCLE_START + (1 - _ONECYCLE_START) * step / rise)
        return peak * _half_cosine(step - rise, total_steps - rise)
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "cosine":
        return peak * _half_cosine(step - warmup, total_steps - warmup)
    if config.schedule == "linear":
        return peak * (total_steps - step) / max(total_steps - warmup, 1)
    return peak


def _half_cosine(step: int, steps: int) -> float:
    """From 1 at the first step down to nearly 0 at the last."""
    return 0.5 * (1 + math.cos(math.pi * min(step / max(steps, 1), 1.0)))
