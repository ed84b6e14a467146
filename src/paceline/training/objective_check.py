"""Checks of the user's loss and metrics before the first step, with made-up outputs of a model.

The calls go to a copy of the functions and the random state is restored, so the run's numbers do not change.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import Cause, UserError
from paceline.parallel.apply import ParallelModel, autocast
from paceline.runtime.detect import World
from paceline.settings.schema import Config
from paceline.settings.tasks import MULTI_LABEL, REGRESSION, has_own_loss
from paceline.training.objective import FunctionFailed, Objective, UserFunction, build_objective
from paceline.training.plan import RunPlan

_log = logging.getLogger("paceline")
# What a model may return: some losses only take probabilities or their logarithms.
_KINDS_OF_OUTPUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda logits: logits,
    lambda logits: logits.softmax(1),
    lambda logits: logits.log_softmax(1),
)
_SMALLEST_BATCH_TO_CUT = 32  # samples: in smaller ones a dependence on the split is easily missed
_RELATIVE_TOLERANCE = 1e-4


def check_objective(config: Config, plan: RunPlan, model: ParallelModel, world: World) -> None:
    """UserError for values that cannot be used; a warning for values that depend on how a batch is cut."""
    if not has_own_loss(config) and not config.train.metrics:
        return
    with _same_random_state(world.device):
        objective = build_objective(config)  # of a file: a copy with its own global variables
        made = _MadeBatches(plan.info.task, plan.info.num_classes, world.device, autocast(model, world))
        warnings = [*_check_loss(objective, plan, made), *_check_metrics(objective, plan, made)]
    if world.is_primary:
        for line in warnings:
            _log.warning("warning: %s", line)


@dataclass(frozen=True)
class _MadeBatches:
    """Outputs and labels of the right shape, from a generator of their own."""

    task: str
    num_classes: int
    device: str
    mixed_precision: AbstractContextManager[object]

    def make(self, size: int, kind: Callable[[Tensor], Tensor], seed: int = 0) -> tuple[Tensor, Tensor]:
        """The first samples differ from the last ones in scale and in classes, so the halves of a batch differ."""
        generator = torch.Generator().manual_seed(seed)
        rising = torch.linspace(0, 1, size)
        logits = torch.randn(size, self.num_classes, generator=generator) * (0.5 + 2 * rising[:, None])
        drawn = torch.rand(size, generator=generator)
        skewed = torch.where(rising < 0.5, drawn.square(), drawn.sqrt())
        labels = (skewed * self.num_classes).long().clamp(max=self.num_classes - 1)
        if self.task == MULTI_LABEL:
            labels = F.one_hot(labels, self.num_classes).float()
        elif self.task == REGRESSION:
            labels = skewed[:, None].repeat(1, self.num_classes)
        return kind(logits).to(self.device), labels.to(self.device)

    def call(self, function: UserFunction, outputs: Tensor, labels: Tensor, *, is_training: bool) -> Tensor:
        """As training or evaluation calls it. The function gets tensors of its own: it may change them in place."""
        labels = labels.clone()
        if not is_training:
            with torch.no_grad():
                value = function(outputs.clone(), labels)
        else:
            with torch.enable_grad(), self.mixed_precision:
                value = function(outputs.clone().requires_grad_().clone(), labels)
        _require_numbers(value, function, outputs)
        return value.detach()


def _check_loss(objective: Objective, plan: RunPlan, made: _MadeBatches) -> Iterator[str]:
    loss = objective.loss
    if not isinstance(loss, UserFunction):
        return
    for kind in _KINDS_OF_OUTPUTS:
        try:
            made.call(loss, *made.make(plan.microbatch_size, kind), is_training=True)
        except FunctionFailed:
            continue
        break
    else:
        return  # the first step fails in the same way, on the model's own outputs
    if plan.evaluation_batch_size:
        made.call(loss, *made.make(plan.evaluation_batch_size, kind), is_training=False)
    _check_soft_targets(loss, plan, made, kind)
    batch = plan.config.train.global_batch_size
    size = min(batch, max(plan.microbatch_size, _SMALLEST_BATCH_TO_CUT))
    difference = _difference_of_halves(loss, size, kind, made, is_training=True)
    if difference is not None:
        yield f"{loss.name} is not a mean over samples ({difference}): {_meaning(plan)}; one value per sample avoids it"


def _check_soft_targets(
    loss: UserFunction, plan: RunPlan, made: _MadeBatches, kind: Callable[[Tensor], Tensor]
) -> None:
    """Mixup and CutMix give a training step a share of each class instead of labels."""
    data = plan.config.data
    if not (data.mixup_alpha or data.cutmix_alpha):
        return
    outputs, labels = made.make(plan.microbatch_size, kind)
    try:
        made.call(
            loss,
            outputs,
            F.one_hot(labels, made.num_classes).float() if labels.dim() == 1 else labels,
            is_training=True,
        )
    except UserError as error:
        raise UserError(
            f"{loss.name} does not take the soft targets of mixup and CutMix",
            where=loss.place,
            got=str(error.got or error.what),
            allowed="a loss of (logits, targets) with targets of shape [samples, classes], as F.cross_entropy",
            hint="leave out --mixup-alpha and --cutmix-alpha, or take another loss",
            cause=Cause.USER_CODE,
        ) from error


def _check_metrics(objective: Objective, plan: RunPlan, made: _MadeBatches) -> Iterator[str]:
    size = plan.evaluation_batch_size
    for metric in objective.metrics.values() if size else ():
        for kind in _KINDS_OF_OUTPUTS:
            try:
                made.call(metric, *made.make(size, kind), is_training=False)
            except FunctionFailed as error:
                failed = error
                continue
            break
        else:
            raise failed
        cut = max(size, _SMALLEST_BATCH_TO_CUT)
        difference = _difference_of_halves(metric, cut, kind, made, is_training=False)
        if difference is not None:
            yield (
                f"the value {metric.name} gives a sample depends on the other samples of its batch ({difference}):"
                " its mean depends on the number of ranks and on --test-batch-size"
            )


def _meaning(plan: RunPlan) -> str:
    accumulate = f"--accumulate {plan.config.train.accumulate}"
    if plan.config.parallel.exact:
        return f"the result depends on --lanes {plan.lanes} and {accumulate}; with these, not on the number of ranks"
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    return f"the result depends on the number of ranks and microbatches (now {ranks}, {accumulate})"


def _difference_of_halves(
    function: UserFunction,
    size: int,
    kind: Callable[[Tensor], Tensor],
    made: _MadeBatches,
    *,
    is_training: bool,
) -> str | None:
    """How the mean of a batch differs from that of its halves; None where it does not, or where that is not known."""
    if size < 2:
        return None
    for seed in (1, 2):
        outputs, labels = made.make(size, kind, seed)
        try:
            parts = [(outputs, labels), *zip(outputs.tensor_split(2), labels.tensor_split(2), strict=True)]
            values = [made.call(function, *part, is_training=is_training) for part in parts]
        except UserError as error:
            return f"it fails on half a batch: {error.got}"
        whole, first, second = (value.double().mean().item() for value in values)
        halves = (first * len(parts[1][1]) + second * len(parts[2][1])) / size
        tolerance = max(_RELATIVE_TOLERANCE, 4 * _precision(values[0])) * max(map(abs, (whole, first, second)))
        if math.isfinite(whole) and math.isfinite(halves) and abs(whole - halves) > tolerance:
            return f"{whole:.5g} for a batch, {halves:.5g} for its halves"
    return None


def _precision(value: Tensor) -> float:
    return torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0


def _require_numbers(value: Tensor, function: UserFunction, outputs: Tensor) -> None:
    """Training averages a loss; evaluation adds up all values on the device of the outputs."""
    is_number = value.is_floating_point() if function.may_be_mean else not value.is_complex()
    if is_number and value.device == outputs.device:
        return
    kind = "floating-point values" if function.may_be_mean else "real values"
    change = f".to({outputs.device.type!r})" if is_number else ".real" if value.is_complex() else ".float()"
    raise UserError(
        f"{function.name} returns values that cannot be used",
        where=function.place,
        hint=f"return value{change}",
        got=f"a tensor of {value.dtype} on {value.device}",
        allowed=f"a tensor of {kind} on {outputs.device}",
    )


@contextmanager
def _same_random_state(device: str) -> Iterator[None]:
    """The functions, and their files when they are imported, may draw random numbers."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.device(device)] if device.startswith("cuda") else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
