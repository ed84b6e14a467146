"""The learning rate as a function of the step. It has no state to save."""

from __future__ import annotations

import math

from paceline.settings.schema import OptimConfig

REFERENCE_BATCH = 256
_ONECYCLE_START = 1 / 25  # of the peak, unless warmup_start_lr says otherwise
_ONECYCLE_RISE = 0.3  # of the run, unless warm-up says otherwise


def peak_learning_rate(config: OptimConfig, global_batch_size: int) -> float:
    """Linear scaling: twice the batch, twice the rate. Muon's updates have one size, whatever the batch."""
    if config.optimizer == "muon":
        return config.base_lr
    return config.base_lr * global_batch_size / REFERENCE_BATCH


def learning_rate(step: int, *, config: OptimConfig, peak: float, steps_per_epoch: int, total_steps: int) -> float:
    """The rate for the update that ends step number `step` (counted from 0)."""
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if config.schedule == "onecycle" and not warmup:
        warmup = max(1, round(_ONECYCLE_RISE * total_steps))
    if step < warmup:
        return _rising(step, warmup, config, peak)
    floor = peak * config.min_lr / config.base_lr
    end = total_steps - round(config.cooldown_epochs * steps_per_epoch)
    if config.schedule in ("cosine", "onecycle"):
        return floor + (peak - floor) * _half_cosine(step - warmup, end - warmup)
    if config.schedule == "linear":
        return floor + (peak - floor) * max(end - step, 0) / max(end - warmup, 1)
    if config.schedule == "steps":
        done = sum(step >= epoch * steps_per_epoch for epoch in config.lr_steps)
        return max(peak * config.lr_step_factor**done, floor)
    return peak


def _rising(step: int, warmup: int, config: OptimConfig, peak: float) -> float:
    if config.warmup_start_lr:
        start = peak * config.warmup_start_lr / config.base_lr
        return start + (peak - start) * step / warmup
    if config.schedule == "onecycle":
        return peak * (_ONECYCLE_START + (1 - _ONECYCLE_START) * step / warmup)
    return peak * (step + 1) / warmup


def _half_cosine(step: int, steps: int) -> float:
    """From 1 at the first step down to nearly 0 at the last."""
    return 0.5 * (1 + math.cos(math.pi * min(step / max(steps, 1), 1.0)))
