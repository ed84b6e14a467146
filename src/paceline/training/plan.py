"""The arithmetic of a run: shares of a batch, number of steps, and an estimate of its memory.

The memory is counted on torch's meta device (shapes, no data).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.data.augment import build_pipeline
from paceline.data.dataset import DatasetInfo
from paceline.data.order import split_folds, split_train_validation
from paceline.errors import UserError
from paceline.models.recompute import require_blocks
from paceline.runs.epoch_clock import EpochClock
from paceline.settings.keep_rules import epoch_length
from paceline.settings.schema import Config
from paceline.settings.tasks import TOP5_CLASSES, best_metric
from paceline.training.freezing import Freezing
from paceline.training.optim import rate_factors
from paceline.training.schedule import learning_rate, peak_learning_rate


@dataclass(frozen=True)
class RunPlan:
    """Numbers that follow from the config, the data set and the number of ranks."""

    config: Config
    info: DatasetInfo
    input_shape: tuple[int, ...]  # in evaluation
    training_shapes: tuple[tuple[int, ...], ...]  # of the inputs of training; several with a schedule of sizes
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
    def largest_shape(self) -> tuple[int, ...]:
        """Of the inputs of training."""
        return max(self.training_shapes)

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
    batch, epoch_samples = config.train.global_batch_size, epoch_length(config.data, num_train)
    if epoch_samples < batch:
        flag = "--epoch-samples" if config.data.epoch_samples else "--keep-share" if config.data.keep_share < 1 else ""
        what = f"samples of an epoch ({flag})" if flag else "training samples"
        raise UserError(
            "the global batch is larger than the training set",
            got=f"global_batch_size {batch}, {epoch_samples} {what}",
            allowed=f"up to {epoch_samples}",
            hint="a smaller --global-batch-size or more data",
        )
    if best_metric(config)[0] == "top5" and info.num_classes < TOP5_CLASSES:
        raise UserError(
            "this data has no metric top5 to select the best checkpoint by",
            where="--best-by",
            got=f"{info.num_classes} classes",
            allowed=f"{TOP5_CLASSES} classes or more",
        )
    if config.train.test_views > 1 and not info.is_image:
        raise UserError(
            "only images have several views",
            got=f"test_views {config.train.test_views}, and {info.name} has vectors",
            hint="--test-views 1",
        )
    if config.train.stop_early and not num_validation:
        raise UserError(
            "stop_early needs a validation set",
            got=f"stop_early {config.train.stop_early}, no validation samples",
            hint="--train-split 0.9, a val folder, or no --stop-early",
        )
    clock = count_epochs(epoch_samples // batch)
    total_steps = clock.end_of(config.train.epochs)
    _require_equal_parts(config, world_size)
    rank_batch = batch // world_size
    pipeline = build_pipeline(config.data, info, config.train.seed)
    shapes = [pipeline.in_epoch(start).input_shape for start, _ in pipeline.training_sizes]
    return RunPlan(
        config=config,
        info=info,
        input_shape=pipeline.input_shape,
        training_shapes=tuple(shapes) or (pipeline.input_shape,),
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


def check_parts(model: nn.Module, plan: RunPlan) -> None:
    """UserError if settings name parts that this model does not have. Also freezes parameters."""
    rate_factors(plan.config.optim, model)
    if plan.config.optim.freeze:
        Freezing(plan.config.optim, model, plan.clock)
    if plan.config.train.activation_checkpointing:
        require_blocks(model)
