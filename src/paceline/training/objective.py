"""The loss and the metrics of a run: built in (losses.py, scores.py), or the user's functions.

A user's loss is a function of (logits, labels) that returns the mean over the samples, or one value per sample. A
metric returns one value per sample; its mean over all samples of all ranks is reported after each validation and test.
`explain_own_code` explains errors whose cause is the user's model or loss, which a restart repeats.
"""

from __future__ import annotations

import inspect
import math
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.data.mixing import hard_labels
from paceline.data.reference import Resolve, resolve_reference
from paceline.errors import Cause, PacelineError, UserError, text_of
from paceline.models.external import first_line
from paceline.runs.local_code import is_local
from paceline.settings.schema import Config
from paceline.settings.tasks import MULTI_LABEL, SINGLE_LABEL, has_own_loss, loss_name, parse_class_weights
from paceline.training.losses import BuiltInLoss, balanced_weights

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

# Exceptions of code that is wrong, which a restart repeats. RuntimeError and OSError may have other causes.
_MISTAKES = (
    *(TypeError, AttributeError, NameError, ValueError, LookupError, ArithmeticError, AssertionError),
    *(NotImplementedError, ImportError),
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


class TeacherLoss(Protocol):
    """The teacher's part of the loss (teacher.py)."""

    def blend(self, loss: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Objective:
    """What a run minimises, and what its evaluations measure."""

    task: str = SINGLE_LABEL
    loss: BuiltInLoss | UserFunction = field(default_factory=BuiltInLoss)
    metrics: dict[str, UserFunction] = field(default_factory=dict)
    teacher: TeacherLoss | None = None
    num_outputs: int | None = None  # of the model for each sample; None: not checked
    model_name: str = ""  # for the error

    def training_loss(self, logits: Tensor, labels: Tensor, inputs: Tensor, scale: Tensor | None = None) -> Tensor:
        """What training minimises: the loss of the labels, and the teacher's part if there is a teacher."""
        if self.num_outputs is not None and logits.shape != (len(labels), self.num_outputs):
            raise UserError(
                f"the first step failed: {self.model_name} does not fit the data",
                got=f"outputs of shape {tuple(logits.shape)} for {len(labels)} samples",
                allowed=f"({len(labels)}, {self.num_outputs}): a value for each class of the data",
                hint="does the model use num_classes?",
                cause=Cause.USER_CODE,
            )
        loss = self.mean_loss(logits, labels, scale)
        return loss if self.teacher is None else self.teacher.blend(loss, logits, inputs)

    def mean_loss(self, logits: Tensor, labels: Tensor, scale: Tensor | None = None) -> Tensor:
        """The loss of the labels. `scale`: of the whole global batch, for a weighted mean (`batch_scale`)."""
        if isinstance(self.loss, UserFunction):
            return self.loss(logits, labels).mean()
        mean = self.loss.mean(logits, labels)
        return mean if scale is None else mean * scale

    def batch_scale(self, labels: Tensor) -> Tensor | None:
        """The scale of each global batch, a row of `labels`. Every rank computes the same: it knows all labels."""
        return self.loss.batch_scale(labels) if isinstance(self.loss, BuiltInLoss) else None

    def sums(self, logits: Tensor, labels: Tensor) -> Tensor:
        """What evaluation adds up, in float64: the samples' losses, then each metric."""
        if isinstance(self.loss, UserFunction):
            losses = self.loss(logits, labels).expand(len(labels))  # of a mean, as often as it has samples
        else:
            losses = self.loss.for_evaluation().per_sample(logits, labels)
        values = [losses, *(metric(logits, labels) for metric in self.metrics.values())]
        return torch.stack([value.double().sum() for value in values])

    def count_correct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The number of samples whose class, or whose every label, is right. 0 for a regression."""
        if self.task == SINGLE_LABEL:
            return (logits.argmax(1) == hard_labels(targets)).sum()
        if self.task == MULTI_LABEL:
            return ((logits > 0) == (targets > 0.5)).all(1).sum()
        return torch.zeros((), dtype=torch.int64, device=logits.device)


def build_objective(
    config: Config,
    resolve: Resolve = resolve_reference,
    *,
    class_weights: Tensor | None = None,
    teacher: TeacherLoss | None = None,
    num_outputs: int | None = None,
) -> Objective:
    """The loss and the metrics of a config. `resolve` finds the user's functions. The last three are for training."""
    train, options = config.train, config.objective
    metrics = {name.rpartition(":")[2]: UserFunction(name, resolve(name, where="--metrics")) for name in train.metrics}
    if has_own_loss(config):
        own = UserFunction(train.loss, resolve(train.loss, where="--loss"), True)
        return Objective(config.data.task, own, metrics, teacher, num_outputs, config.model.model_name)
    built_in = BuiltInLoss(
        name=loss_name(config),
        label_smoothing=config.optim.label_smoothing,
        bce_threshold=options.bce_threshold,
        focal_gamma=options.focal_gamma,
        class_weights=class_weights,
    )
    return Objective(config.data.task, built_in, metrics, teacher, num_outputs, config.model.model_name)


def find_class_weights(config: Config, labels: Tensor, classes: tuple[str, ...], device: str) -> Tensor | None:
    """The weights of --class-weights, in the order of the classes. `labels`: of all training samples."""
    texts = config.objective.class_weights
    if not texts:
        return None
    numbers = parse_class_weights(texts, where="--class-weights")
    if numbers is None:
        weights = balanced_weights(labels, len(classes))
        absent = [name for name, weight in zip(classes, weights.tolist(), strict=True) if not math.isfinite(weight)]
        if absent:
            raise UserError(
                "balanced class weights need training samples of every class",
                where="--class-weights",
                got=f"none of {', '.join(absent[:8])}",
                hint="give the weights as numbers",
            )
        return weights.float().to(device)
    require_weight_per_class(config, classes)
    return torch.tensor(numbers, device=device)


def require_weight_per_class(config: Config, classes: tuple[str, ...]) -> None:
    numbers = parse_class_weights(config.objective.class_weights, where="--class-weights")
    if numbers is not None and len(numbers) != len(classes):
        raise UserError(
            "the number of class weights is not the number of classes",
            where="--class-weights",
            got=f"{len(numbers)} weights",
            allowed=f"{len(classes)}: {', '.join(classes[:8])}{', ...' if len(classes) > 8 else ''}",
        )


def explain_own_code(error: Exception, config: Config, phase: str) -> UserError | None:
    """None for an error that says nothing about code of the user's own. `phase`: what failed."""
    names = [name for name in (config.model.model_name, config.train.loss) if ":" in name]
    text, what, line = text_of(error), " or ".join(names), _line_of(error)
    if isinstance(error, PacelineError | OSError | torch.OutOfMemoryError):
        return None
    if names and _NO_GRADIENT in text:
        return UserError(
            f"the loss of {what} has no gradient",
            where=line or names[0],
            got=first_line(error),
            allowed="a loss computed from the logits by differentiable operations, and parameters that are trained",
            hint="leave out argmax, detach(), .item() and requires_grad_(False)",
            cause=Cause.USER_CODE,
        )
    if names and _DOES_NOT_FIT.search(text):
        return UserError(
            f"{phase} failed: {what} does not fit the data",
            where=line or names[0],
            got=first_line(error),
            allowed="a model that takes a batch of samples and returns one value per class for each of them",
            hint="does the model function use num_classes and input_shape?",
            cause=Cause.USER_CODE,
        )
    if line and isinstance(error, _MISTAKES):
        return UserError(f"{phase} failed in your code", where=line, got=first_line(error), cause=Cause.USER_CODE)
    return None


def _line_of(error: Exception) -> str:
    """The innermost line in a file of the user's. Empty: there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_file() and is_local(Path(frame.filename))]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""
