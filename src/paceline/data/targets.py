"""Targets of users for several labels per sample and for regression, and weights of samples.

Labels of one class per sample are in `labels.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.data.labels import distinct_names, refuse_masked
from paceline.data.parts import TRAIN
from paceline.data.picture_table import LARGEST_FLOAT32, number_names
from paceline.errors import UserError
from paceline.settings.tasks import REGRESSION


def as_targets(values: Any, task: str) -> Tensor:
    """float32 [N, columns]: 0 and 1 for each class, or the numbers of a regression."""
    targets = _as_tensor(values)
    if task == REGRESSION:
        if targets.ndim not in (1, 2) or targets.dtype.is_complex:
            raise _wrong_targets(targets, "one finite number per sample, or a row of them")
        _require_finite(targets)
        numbers = targets.float().reshape(len(targets), -1)
        if not bool(numbers.isfinite().all()):
            raise UserError(
                "a label is too large for training",
                got=f"{float(targets.abs().max()):g}",
                allowed=f"up to {LARGEST_FLOAT32:.1e} (float32)",
                hint="scale the labels to about -1 to 1",
            )
        return numbers
    if targets.ndim != 2 or targets.dtype.is_complex or not bool(((targets == 0) | (targets == 1)).all()):
        raise _wrong_targets(targets, "a row of 0 and 1 per sample, one for each class")
    return targets.float()


def _require_finite(targets: Tensor) -> None:
    is_bad = ~targets.isfinite().reshape(len(targets), -1).all(1)
    if bool(is_bad.any()):
        first = int(is_bad.int().argmax())
        raise UserError(
            "a label is not finite",
            where=f"sample {first}",
            got=f"{targets[first].tolist()}; {int(is_bad.sum())} of {len(targets)} samples",
            allowed="one finite number per sample, or a row of them",
            hint="leave these samples out",
        )


def as_weights(values: Any, count: int) -> Tensor:
    """float64 [N]: how often a sample is visited with weighted sampling."""
    weights = _as_tensor(values)
    if weights.shape != (count,) or weights.dtype.is_complex:
        raise UserError(
            "sample weights of this kind cannot be used",
            got=f"{weights.dtype} of shape {tuple(weights.shape)}",
            allowed=f"one number per sample, shape ({count},)",
        )
    return weights.double()


def column_names(classes: Any, columns: Mapping[str, int], task: str) -> tuple[str, ...]:
    """Of several labels: the classes. Of a regression: its numbers. `columns`: how many the targets of a part have."""
    count, least = columns[TRAIN], 1 if task == REGRESSION else 2
    if count < least or any(other != count for other in columns.values()):
        raise UserError(
            "the labels have a wrong number of columns",
            got=", ".join(f"{part}: {number}" for part, number in columns.items()),
            allowed=f"{least} or more, the same in every part",
        )
    if classes is None or classes == count:
        return number_names(count) if task == REGRESSION else tuple(map(str, range(count)))
    if isinstance(classes, str) or not isinstance(classes, Sequence) or len(classes) != count:
        raise UserError("the class names do not fit the labels", got=repr(classes), allowed=f"{count} names in a list")
    return tuple(distinct_names(classes))


def _as_tensor(values: Any) -> Tensor:
    refuse_masked(values)
    if isinstance(values, Tensor):
        return values.detach().cpu()
    if isinstance(values, list):  # of a map-style data set: the label of each item
        values = [value.tolist() if isinstance(value, Tensor) else value for value in values]
    try:
        return torch.from_numpy(np.array(values))  # a copy: the user's array may be read-only
    except (TypeError, ValueError) as error:
        kind = f"a {type(values).__name__}"
        raise UserError("this is not an array of numbers", got=kind, allowed="numbers for each sample") from error


def _wrong_targets(targets: Tensor, allowed: str) -> UserError:
    return UserError(
        "labels of this kind cannot be trained on",
        got=f"{targets.dtype} of shape {tuple(targets.shape)}",
        allowed=allowed,
    )
