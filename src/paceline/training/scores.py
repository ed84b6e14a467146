"""The built-in metrics of an evaluation, by task. All are computed from sums over all samples of all ranks.

- single-label: from the confusion matrix (accuracy, balanced_accuracy, f1) and a count (top5)
- multi-label: from the outputs for all samples (map, f1, accuracy)
- regression: from sums of errors (mae, rmse)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.parallel.collectives import gather_rows, sum_over_ranks
from paceline.runtime.detect import World
from paceline.settings.tasks import MULTI_LABEL, REGRESSION, SINGLE_LABEL, TOP5_CLASSES

PerClass = list[float | None]  # None where a value is not defined, such as the accuracy of a class without samples


@dataclass(frozen=True)
class Scores:
    """The built-in metrics of an evaluation."""

    accuracy: float | None  # None for a regression
    metrics: dict[str, float]
    per_class: dict[str, PerClass] = field(default_factory=dict)


def as_answers(task: str, outputs: Tensor) -> Tensor:
    """Outputs of a model as a user reads them: probabilities of classes, of each label by itself, or numbers."""
    if task == SINGLE_LABEL:
        return outputs.softmax(1)
    return outputs.sigmoid() if task == MULTI_LABEL else outputs


# --- What evaluation adds up, sample by sample


def score_sums(task: str, outputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Sums over the samples of a batch: top5 of classes, or the errors of each number of a regression."""
    if task == SINGLE_LABEL and outputs.shape[1] >= TOP5_CLASSES:
        return [outputs.topk(5).indices.eq(targets[:, None]).any(1).double().sum()]
    if task == REGRESSION:
        errors = (outputs.double() - targets.double()).abs()
        return [*errors.sum(0).unbind(), *errors.square().sum(0).unbind()]
    return []


def num_score_sums(task: str, num_classes: int) -> int:
    if task == SINGLE_LABEL:
        return int(num_classes >= TOP5_CLASSES)
    return 2 * num_classes if task == REGRESSION else 0


# --- The metrics


def score_classes(confusion: Tensor, sums: Sequence[float]) -> Scores:
    """`confusion`: rows are true classes, columns are predicted ones. `sums`: of `score_sums`."""
    samples = max(int(confusion.sum()), 1)
    right, true, predicted = confusion.diagonal().tolist(), confusion.sum(1).tolist(), confusion.sum(0).tolist()
    recall = [_share(count, total) for count, total in zip(right, true, strict=True)]
    precision = [_share(count, total) for count, total in zip(right, predicted, strict=True)]
    f1 = [_share(2 * count, a + b) for count, a, b in zip(right, true, predicted, strict=True)]
    metrics = {"balanced_accuracy": _mean(recall), "f1": _mean(f1)}
    if sums:
        metrics["top5"] = sums[0] / samples
    return Scores(sum(right) / samples, metrics, {"accuracy": recall, "precision": precision, "f1": f1})


def score_numbers(sums: Sequence[float], samples: int) -> Scores:
    """mae: the mean absolute error. rmse: the root of the mean squared error. Both over all samples and numbers."""
    count = len(sums) // 2
    errors, squares = ([value / max(samples, 1) for value in part] for part in (sums[:count], sums[count:]))
    metrics = {"mae": sum(errors) / count, "rmse": math.sqrt(sum(squares) / count)}
    return Scores(None, metrics, {"mae": list(errors)})


def score_labels(outputs: Tensor, targets: Tensor) -> Scores:
    """Of all samples. map: the mean of the classes' average precision. accuracy: all labels of a sample are right."""
    is_given, is_true = outputs.numpy() > 0, targets.numpy() > 0.5
    precisions = [average_precision(column, truth) for column, truth in zip(outputs.numpy().T, is_true.T, strict=True)]
    right, true, predicted = (part.sum(0).tolist() for part in (is_given & is_true, is_true, is_given))
    f1 = [_share(2 * count, a + b) for count, a, b in zip(right, true, predicted, strict=True)]
    accuracy = int((is_given == is_true).all(1).sum()) / max(len(is_true), 1)
    return Scores(accuracy, {"map": _mean(precisions), "f1": _mean(f1)}, {"average_precision": precisions, "f1": f1})


def average_precision(scores: npt.NDArray[np.float32], is_true: npt.NDArray[np.bool_]) -> float | None:
    """The sum of precision times the gain in recall, over thresholds. Equal scores share one threshold.

    None if no sample has the class.
    """
    positives = int(is_true.sum())
    if positives == 0:
        return None
    order = np.argsort(-scores, kind="stable")
    ends = np.append(np.nonzero(np.diff(scores[order]))[0], len(scores) - 1)
    found = np.cumsum(is_true[order])[ends]
    gained = np.diff(found, prepend=0)
    return float((gained * (found / (ends + 1))).sum() / positives)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: PerClass) -> float:
    """Over the classes that have a value."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


# --- Outputs for all samples, which only multi-label metrics need


class CollectedOutputs:
    """This rank's outputs and targets, in CPU memory, batch by batch."""

    def __init__(self, task: str, num_classes: int) -> None:
        self._is_needed = task == MULTI_LABEL
        self._rows = [torch.zeros(0, 2, num_classes)]

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        if self._is_needed:
            self._rows.append(torch.stack([outputs, targets.to(outputs)], dim=1).cpu())

    def gather(self, world: World) -> tuple[Tensor, Tensor]:
        """Those of all ranks, in the order of ranks, which is the order of samples. Collective."""
        own = torch.cat(self._rows)
        if world.world_size > 1:
            sizes = torch.zeros(world.world_size, dtype=torch.int64, device=world.device)
            sizes[world.rank] = len(own)
            sum_over_ranks(sizes, world)
            padded = torch.zeros(int(sizes.max()), *own.shape[1:], device=world.device)
            padded[: len(own)] = own
            everyone = gather_rows(padded, world).cpu()
            own = torch.cat([rows[:size] for rows, size in zip(everyone, sizes.tolist(), strict=True)])
        return own[:, 0], own[:, 1]
