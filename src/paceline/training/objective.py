"""The loss and the metrics: cross entropy and accuracy, or the user's functions.

A loss is a function of (logits, labels) that returns the mean over the samples, or one value per sample. A metric
returns one value per sample; its mean over all samples of all ranks is reported after each validation and test.

`check_objective` calls the user's functions before the first step, with made-up outputs of a model. The calls go to a
copy of the functions and the random state is restored, so the run's numbers do not change. `explain_own_code` explains
errors of the first step whose cause is the user's model or loss: a restart would repeat them.
"""

from __future__ import annotations

import inspect
import logging
import math
import random
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.data.reference import Resolve, resolve_reference
from paceline.errors import Cause, PacelineError, UserError, text_of
from paceline.models.external import first_line
from paceline.parallel.apply import ParallelModel, autocast
from paceline.runtime.detect import World
from paceline.settings.schema import Config
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
_NO_GRADIENT = "does not require grad and does not have a grad_fn"
# What torch says of tensors that do not fit together. Other errors may have causes that a restart ends.
_DOES_NOT_FIT = re.compile(
    r"target \d+ is out of bounds|shapes cannot be multiplied|must match the size|expected input"
    r"|invalid for input of size|size mismatch|shape mismatch|expected .* to have|number of dimensions|out of range"
    r"|expected target size"
    r"|batch_size.* to match|normalized_shape|must match the existing size|given groups="
    r"|same dtype|expected scalar type|input type .* type .* should be the same",
    re.IGNORECASE,
)


class FunctionFailed(UserError):
    """A function of the user's own raised an exception."""

    cause = Cause.USER_CODE


@dataclass(frozen=True)
class UserFunction:
    """A function of (logits, labels), and the name it was given by."""

    name: str
    function: Callable[[Tensor, Tensor], Any]
    may_be_mean: bool = False

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        try:
            value = self.function(logits, labels)
        except (PacelineError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            shapes = f"logits of shape {list(logits.shape)} and labels of shape {list(labels.shape)}"
            raise FunctionFailed(
                f"{self.name} failed",
                where=self._line_of(error),
                got=first_line(error),
                hint=f"it is called with {shapes}",
            ) from error
        if not isinstance(value, Tensor):
            raise self._refusal(got=f"a {type(value).__name__}", labels=labels, hint=self._example)
        if value.layout is not torch.strided or value.is_nested:
            kind = "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
            hint = "return value.to_padded_tensor(0)" if value.is_nested else "return value.to_dense()"
            raise self._refusal(got=kind, labels=labels, hint=hint)
        shape = tuple(value.shape)
        if shape == (len(labels),) or (shape == () and self.may_be_mean):
            return value
        if shape == ():
            hint = "leave out .mean() or .sum(): evaluation takes the mean over all samples itself"
        elif shape[0] == len(labels):
            hint = "one value for each sample: return value.flatten(1).mean(1)"
        else:
            hint = self._example
        raise self._refusal(got=f"a tensor of shape {list(shape)}", labels=labels, hint=hint)

    @property
    def place(self) -> str:
        """Where the user finds it: the file and line of its definition, or the name it was given by."""
        code = self._code
        return f"{code.co_filename}, line {code.co_firstlineno}" if code is not None else self.name

    @property
    def _code(self) -> CodeType | None:
        """None for a function that is not written in Python."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return code if isinstance(code, CodeType) else None

    def _line_of(self, error: Exception) -> str:
        """The innermost line in the user's file: torch may have raised the error below it."""
        own_file = self._code.co_filename if self._code is not None else ""
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == own_file]
        return f"{own_file}, line {own[-1].lineno}" if own else self.place

    @property
    def _example(self) -> str:
        value = "F.cross_entropy(logits, labels)" if self.may_be_mean else "(logits.argmax(1) == labels).float()"
        return f"return a tensor, such as {value}"

    def _refusal(self, *, got: str, labels: Tensor, hint: str) -> UserError:
        per_sample = f"one value per sample, a dense tensor of shape {[len(labels)]}"
        return UserError(
            f"{self.name} returns something else than it should",
            where=self.place,
            got=got,
            allowed=per_sample + (", or their mean" if self.may_be_mean else ""),
            hint=hint,
        )


@dataclass(frozen=True)
class Objective:
    loss: UserFunction | None = None  # None: cross entropy
    label_smoothing: float = 0.0
    metrics: dict[str, UserFunction] = field(default_factory=dict)

    def mean_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What training minimises."""
        if self.loss is None:
            return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        return self.loss(logits, labels).mean()

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What evaluation adds up, in float64: the samples' losses, then each metric."""
        if self.loss is None:
            losses = F.cross_entropy(logits, labels, reduction="none")
        else:
            losses = self.loss(logits, labels).expand(len(labels))  # of a mean, as often as it has samples
        values = [losses, *(metric(logits, labels) for metric in self.metrics.values())]
        return torch.stack([value.double().sum() for value in values])


def build_objective(config: Config, resolve: Resolve = resolve_reference) -> Objective:
    """The loss and the metrics of a config. `resolve` finds the user's functions."""
    train = config.train
    loss = UserFunction(train.loss, resolve(train.loss, where="--loss"), True) if train.loss else None
    metrics = {name.rpartition(":")[2]: UserFunction(name, resolve(name, where="--metrics")) for name in train.metrics}
    return Objective(loss, config.optim.label_smoothing, metrics)


def check_objective(config: Config, plan: RunPlan, model: ParallelModel, world: World) -> None:
    """UserError for values that cannot be used; a warning for values that depend on how a batch is cut."""
    if not config.train.loss and not config.train.metrics:
        return
    with _same_random_state(world.device):
        objective = build_objective(config)  # of a file: a copy with its own global variables
        made = _MadeBatches(plan.info.num_classes, world.device, autocast(model, world))
        warnings = [*_check_loss(objective, plan, made), *_check_metrics(objective, plan, made)]
    if world.is_primary:
        for line in warnings:
            _log.warning("warning: %s", line)


@dataclass(frozen=True)
class _MadeBatches:
    """Outputs and labels of the right shape, from a generator of their own."""

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
    if loss is None:
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
        made.call(loss, outputs, F.one_hot(labels, made.num_classes).float(), is_training=True)
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


def explain_own_code(error: Exception, config: Config) -> UserError | None:
    """None for an error that says nothing about functions of the user's own."""
    names = [name for name in (config.model.model_name, config.train.loss) if ":" in name]
    text = text_of(error)
    if not names or isinstance(error, PacelineError | OSError | torch.OutOfMemoryError):
        return None
    what = " or ".join(names)
    where = _line_of(error, names)
    if _NO_GRADIENT in text:
        return UserError(
            f"the loss of {what} has no gradient",
            where=where,
            got=first_line(error),
            allowed="a loss computed from the logits by differentiable operations",
            hint="leave out argmax, detach() and .item()",
            cause=Cause.USER_CODE,
        )
    if not _DOES_NOT_FIT.search(text):
        return None
    return UserError(
        f"the first step failed: {what} does not fit the data",
        where=where,
        got=first_line(error),
        allowed="a model that takes a batch of samples and returns one value per class for each of them",
        hint="does the model function use num_classes and input_shape?",
        cause=Cause.USER_CODE,
    )


def _line_of(error: Exception, names: list[str]) -> str:
    """The innermost line in a file of the user's; else the name."""
    files = {Path(name.rpartition(":")[0]).name for name in names}
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name in files]
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}" if theirs else names[0]
