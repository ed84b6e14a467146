"""The settings of the optimizer: rates, schedule, clipping, frozen layers, moving average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.settings.declare import Range
from paceline.settings.numbers import Count, Factor, Fraction, NonNegative, Share


@dataclass(frozen=True)
class OptimConfig:
    optimizer: Literal["sgd", "nesterov", "adam", "adamw", "lamb", "muon"] = "sgd"
    """nesterov is sgd with Nesterov momentum; lamb is adamw with a step per layer that follows the size of its weights;
    muon makes the updates of hidden weights orthogonal."""

    base_lr: Factor = 0.05
    """Learning rate for a global batch of 256, scaled linearly to the actual batch (muon: not scaled)."""

    momentum: Fraction = 0.9
    """Momentum of sgd, nesterov and muon."""

    weight_decay: NonNegative = 5e-4
    """Weight decay (decoupled under adamw and lamb)."""

    decay_norms_and_biases: bool = True
    """Apply weight decay also to norms, biases, and position and class embeddings."""

    layer_decay: Share = 1.0
    """Multiply the learning rate by this once for each layer between a parameter and the head; 1: the same rate for
    all layers."""

    head_lr_factor: Factor = 1.0
    """Multiply the learning rate of the head by this."""

    freeze: tuple[str, ...] = ()
    """Do not train parameters with these names: patterns such as "layer1" or "blocks.[0-5].*". Separate several with
    spaces."""

    unfreeze_at: Count = 0
    """Train the frozen parameters from this epoch on, counted from 1; 0: never."""

    schedule: Literal["constant", "linear", "cosine", "onecycle", "steps"] = "cosine"
    """Learning-rate schedule over the whole run. steps: multiply by lr-step-factor after each epoch of lr-steps."""

    warmup_epochs: NonNegative = 0.0
    """Epochs of linear warm-up before the schedule (onecycle: its rising part)."""

    warmup_start_lr: NonNegative = 0.0
    """Learning rate at which the warm-up starts, scaled like base-lr; 0: at the first step's share of the peak
    (onecycle: a 25th of it)."""

    min_lr: NonNegative = 0.0
    """Learning rate at which the schedule ends, scaled like base-lr."""

    cooldown_epochs: NonNegative = 0.0
    """Last epochs of the run that keep the rate at which the schedule has ended."""

    lr_steps: Annotated[tuple[int, ...], Range(low=1)] = ()
    """Epochs after which schedule steps multiplies the rate, in increasing order."""

    lr_step_factor: Share = 0.1
    """The factor of schedule steps."""

    clip_norm: NonNegative = 0.0
    """Clip the global gradient norm to this; 0 for no clipping."""

    clip_value: NonNegative = 0.0
    """Clip each element of the gradients to at most this; 0 for no clipping."""

    clip_agc: NonNegative = 0.0
    """Adaptive gradient clipping: clip the gradient of each unit (row of a weight) to this share of the unit's own
    norm, except in the head; 0 for no clipping."""

    label_smoothing: Fraction = 0.0
    """Label smoothing of the training loss."""

    ema_decay: Fraction = 0.0
    """Keep an exponential moving average of the weights and evaluate with it; 0 for none."""

    ema_warmup_epochs: NonNegative = 0.0
    """Start the moving average after this many epochs; until then it equals the weights."""
