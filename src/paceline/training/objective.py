"""What is minimised and what is measured: cross entropy and accuracy, or functions of the user's own.

A loss is a function of (logits, labels) that returns the mean over the samples, or one value per sample. A metric
returns one value per sample; its mean over all samples of all ranks is told after each validation and test.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.data.reference import resolve_reference
from paceline.errors import Cause, PacelineError, UserError
from paceline.models.external import first_line
from paceline.settings.schema import Config


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
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename}, line {frame.lineno}"
            raise FunctionFailed(f"{self.name} failed", where=where, got=first_line(error)) from error
        is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
        if isinstance(value, Tensor) and not is_dense:
            raise UserError(
                f"{self.name} returns something else than it should",
                got="a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}",
                allowed="a dense tensor, such as value.to_dense()",
            )
        shape = tuple(value.shape) if is_dense else None
        if shape == tuple(labels.shape) or (shape == () and self.may_be_mean):
            return value  # type: ignore[no-any-return]
        raise UserError(
            f"{self.name} returns something else than it should",
            got=f"a {type(value).__name__}" if shape is None else f"a tensor of shape {list(shape)}",
            allowed=f"one value per sample, a tensor of shape {list(labels.shape)}"
            + (", or their mean" if self.may_be_mean else ""),
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
