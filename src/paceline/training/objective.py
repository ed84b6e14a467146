"""What is minimised and what is measured: cross entropy and accuracy, or functions of the user's own.

A loss is a function of (logits, labels) that returns the mean over the samples, or one value per sample. A metric
returns one value per sample; its mean over all samples of all ranks is told after each validation and test.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.data.reference import resolve_reference
from paceline.errors import PacelineError, UserError
from paceline.models.external import first_line
from paceline.settings.schema import Config


class FunctionFailed(UserError):
    """A function of the user's own raised an exception."""


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
        if shape == tuple(labels.shape) or (shape == () and self.may_be_mean):
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
        per_sample = f"one value per sample, a dense tensor of shape {list(labels.shape)}"
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


def build_objective(config: Config) -> Objective:
    train = config.train
    loss = UserFunction(train.loss, resolve_reference(train.loss, where="--loss"), True) if train.loss else None
    metrics = {
        name.rpartition(":")[2]: UserFunction(name, resolve_reference(name, where="--metrics"))
        for name in train.metrics
    }
    return Objective(loss, config.optim.label_smoothing, metrics)
