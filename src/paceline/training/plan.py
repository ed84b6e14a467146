"""The arithmetic of a run: shares of a batch, number of steps, learning rate, and an estimate of its memory.

The learning rate is a function of the step, so it has no state to save. The memory is counted on torch's meta device
(shapes, no data).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.data.augment import build_pipeline
from paceline.data.dataset import DatasetInfo
from paceline.data.order import split_folds, split_train_validation
from paceline.errors import UserError
from paceline.models.registry import build_model
from paceline.runs.epoch_clock import EpochClock
from paceline.settings.schema import Config, OptimConfig

REFERENCE_BATCH = 256
_ONECYCLE_START = 1 / 25  # of the peak
_ONECYCLE_RISE = 0.3  # of the run, unless warm-up says otherwise
_OPTIMIZER_COPIES = {"sgd": 1, "nesterov": 1, "adam": 2, "adamw": 2, "muon": 1}


@dataclass(frozen=True)
class RunPlan:
    """Numbers that follow from the config, the data set and the number of ranks."""

    config: Config
    info: DatasetInfo
    input_shape: tuple[int, ...]
    num_train: int
    num_validation: int
    world_size: int
    lanes: int
    rank_batch_size: int
    microbatch_size: int
    clock: EpochClock
    total_steps: int  # of all epochs: what the learning-rate curve spans
    last_step: int  # where this run ends, which --max-steps may bring forward
    peak_lr: float

    @property
    def steps_per_epoch(self) -> int:
        return self.clock.steps_per_epoch

    @property
    def evaluation_batch_size(self) -> int:
        """Samples in a rank's first batch of the test, or of a validation without one; 0 where nothing is evaluated."""
        samples = self.info.num_test or self.num_validation
        shares = self.lanes if self.config.parallel.exact else self.world_size
        return min(self.config.train.test_batch_size, -(-samples // shares))

    def learning_rate(self, step: int) -> float:
        return learning_rate(
            step,
            config=self.config.optim,
            peak=self.peak_lr,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.total_steps,
        )


def make_plan(
    config: Config,
    info: DatasetInfo,
    world_size: int,
    parts: tuple[int, int] | None = None,
    count_epochs: Callable[[int], EpochClock] = EpochClock,
) -> RunPlan:
    """Check what depends on the data or on the number of ranks. The rules of the config check the rest.

    `parts`: how many samples are trained on and validated with, if it is not decided by the length of the data.
    `count_epochs`: makes the epoch clock of a run with so many steps per epoch; a resumed run continues its own.
    """
    if parts is None:
        train, validation = split_samples(info, config)
        parts = len(train), len(validation)
    num_train, num_validation = parts
    batch = config.train.global_batch_size
    if num_train < batch:
        raise UserError(
            "the global batch is larger than the training set",
            got=f"global_batch_size {batch}, {num_train} training samples",
            allowed=f"up to {num_train}",
            hint="a smaller --global-batch-size or more data",
        )
    if config.train.test_views > 1 and not info.is_image:
        raise UserError(
            "only images have several views",
            got=f"test_views {config.train.test_views}, and {info.name} has vectors",
            hint="--test-views 1",
        )
    clock = count_epochs(num_train // batch)
    total_steps = clock.end_of(config.train.epochs)
    _require_equal_parts(config, world_size)
    rank_batch = batch // world_size
    return RunPlan(
        config=config,
        info=info,
        input_shape=build_pipeline(config.data, info, config.train.seed).input_shape,
        num_train=num_train,
        num_validation=num_validation,
        world_size=world_size,
        lanes=config.parallel.lanes or world_size,
        rank_batch_size=rank_batch,
        microbatch_size=rank_batch // config.train.accumulate,
        clock=clock,
        total_steps=total_steps,
        last_step=min(total_steps, config.train.max_steps or total_steps),
        peak_lr=peak_learning_rate(config.optim, batch),
    )


def split_samples(info: DatasetInfo, config: Config) -> tuple[Tensor, Tensor]:
    """Sample ids to train on and to validate with: of the training set, or of the data's own validation set."""
    folds = config.data.folds
    if info.num_validation:
        return torch.arange(info.num_train), torch.arange(info.num_validation)
    if folds > info.num_train:
        raise UserError(
            f"the training set cannot be cut into {folds} folds",
            where="folds",
            got=f"{info.num_train:,} training samples",
            allowed=f"up to {info.num_train}",
        )
    if folds:
        return split_folds(info.num_train, folds, config.data.fold, config.train.seed)
    return split_train_validation(info.num_train, config.data.train_split)


def _require_equal_parts(config: Config, world_size: int) -> None:
    """Every rank, lane and microbatch has equally many samples, whichever launcher started the ranks."""
    batch, accumulate = config.train.global_batch_size, config.train.accumulate
    lanes = config.parallel.lanes or world_size
    parts = accumulate * (lanes if config.parallel.exact else world_size)
    if lanes % world_size or batch % world_size or batch % parts:
        raise UserError(
            "the global batch does not fall into equal parts",
            got=f"global_batch_size {batch} over {world_size} ranks, {lanes} lanes, {accumulate} microbatches",
            allowed=f"a multiple of {parts}",
            hint="another --global-batch-size or --accumulate",
        )


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


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per rank. Activations are the outputs of all layers of one microbatch: an upper guide."""

    num_parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(plan: RunPlan, strategy: str, *, is_mixed: bool) -> MemoryEstimate:
    config = plan.config
    with torch.device("meta"):
        model = build_model(config.model, plan.input_shape, plan.info.num_classes, load_weights=False)
        elements = _count_activations(model, torch.empty(plan.microbatch_size, *plan.input_shape))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    shards = plan.world_size if strategy == "fsdp" else 1
    copies = (
        _OPTIMIZER_COPIES[config.optim.optimizer] if config.optim.momentum or "adam" in config.optim.optimizer else 0
    )
    weights = 4 * num_parameters // shards
    averages = weights if config.optim.ema_decay else 0
    return MemoryEstimate(
        num_parameters=num_parameters,
        weights=weights + averages,
        gradients=weights,
        optimizer=weights * copies,
        activations=elements * (2 if is_mixed else 4),
    )


def _count_activations(model: nn.Module, inputs: Tensor) -> int:
    """Elements that leave the leaf modules in one forward pass."""
    elements = [inputs.numel()]

    def count(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            elements.append(output.numel())

    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(count)
    model(inputs)
    return sum(elements)
