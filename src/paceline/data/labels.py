"""Labels of users: whole numbers, texts or bools. Classes are numbered from 0.

Texts become classes in alphabetical order, False and True the classes 0 and 1. Whole numbers are the numbers of
classes already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.dataset import MOST_CLASSES
from paceline.data.parts import TRAIN
from paceline.errors import UserError
from paceline.settings.text import check_text

RawLabels = NDArray[Any]  # of a kind in _KINDS, one dimension
_KINDS = {"i": "whole numbers", "u": "whole numbers", "b": "bools", "U": "texts"}
_BOOLS = ("False", "True")
_NO_LABEL = "leave out the samples without a label"


def as_raw_labels(values: Any) -> RawLabels:
    """An array of whole numbers, texts or bools. UserError for anything else."""
    refuse_masked(values)
    try:
        labels = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:  # of several lengths, for example
        raise _wrong_labels(f"a {type(values).__name__}", None) from error
    if labels.shape == (0,):
        raise no_samples()
    if labels.dtype.kind == "O" and all(isinstance(label, str) for label in labels.flat):  # pandas has no text type
        labels = labels.astype(str)
    elif labels.dtype.kind == "U" and isinstance(values, Sequence):
        _require_texts(values)  # numpy converts None and numbers among texts to texts
    if labels.dtype.kind not in _KINDS or labels.ndim != 1:
        raise _wrong_labels(f"{labels.dtype} of shape {tuple(labels.shape)}", _hint_for(labels))
    if labels.dtype.kind == "i" and labels.min() < 0:
        raise UserError("a label is negative", got=int(labels.min()), allowed="0, 1, 2, ...")
    return labels


def _require_texts(values: Sequence[Any]) -> None:
    other = next((number for number, value in enumerate(values) if not isinstance(value, str)), None)
    if other is not None:
        raise _wrong_labels(f"texts, and {values[other]!r} of sample {other}", _NO_LABEL)


def refuse_masked(values: Any) -> None:
    """numpy's conversions ignore the mask: hidden values would be trained on."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise UserError(
            "values are masked, and masks are not supported",
            got=f"{int(np.ma.getmaskarray(values).sum()):,} masked values of {values.size:,}",
            allowed="arrays without masked values",
            hint="x.filled(0), or leave these samples out",
        )


def no_samples() -> UserError:
    return UserError("there are no samples", allowed="at least one")


def _wrong_labels(got: str, hint: str | None) -> UserError:
    return UserError(
        "labels of this kind cannot be trained on",
        got=got,
        allowed="one per sample: whole numbers from 0, texts or bools",
        hint=hint,
    )


def _hint_for(labels: RawLabels) -> str | None:
    if labels.ndim == 2 and labels.dtype.kind in "iufb":
        if labels.shape[1] == 1:
            return "y.ravel() for a column of labels"
        return "y.argmax(1) for rows of 0 with one 1, task='multi-label' for rows of 0 and 1, or task='regression'"
    is_missing = labels.dtype.kind == "f" and bool(np.isnan(labels).any())
    if is_missing or (labels.dtype.kind == "O" and any(isinstance(label, str) for label in labels.flat)):
        return _NO_LABEL
    if labels.dtype.kind == "f":
        return "y.astype(int) for whole numbers that are stored as floats, or task='regression'"
    return None


def class_names(classes: Any, labels: Sequence[RawLabels]) -> tuple[str, ...]:
    """The names of all classes. `classes`: their names, their number, or None. `labels`: those of each part."""
    kinds = {_KINDS[part.dtype.kind] for part in labels}
    if len(kinds) > 1:
        raise UserError("the parts have labels of several kinds", got=" and ".join(sorted(kinds)), allowed="one kind")
    found = np.unique(np.concatenate([np.unique(part) for part in labels])).tolist()
    if kinds == {"whole numbers"}:
        return _names_of_numbers(classes, found)
    names = list(_BOOLS) if kinds == {"bools"} and classes is None else found
    if classes is not None:
        names = _given_names(classes, 2)
    if kinds == {"bools"}:
        return _require_two(names)
    unknown = [label for label in found if label not in set(names)]
    if unknown:
        raise UserError(
            "a label is not one of the classes",
            got=", ".join(map(repr, unknown[:8])),
            allowed=", ".join(map(repr, names[:12])) + (", ..." if len(names) > 12 else ""),
        )
    if len(names) < 2:
        raise UserError("all labels are the same", got=repr(names[0]), allowed="two or more classes")
    return tuple(check_text(name, "the name of a class", where="labels") for name in names)


def require_trained_labels(labels: Mapping[str, RawLabels]) -> None:
    """UserError for a text that no training sample has: it may be mistyped. `labels`: of each part.

    A number may be missing in training, as long as the numbers of all parts have no gap.
    """
    trained = np.unique(labels[TRAIN])
    for part, found in labels.items():
        unknown = np.setdiff1d(found, trained).tolist() if found.dtype.kind == "U" else []
        if unknown:
            raise UserError(
                f"a label of the {part} part does not occur in the training part",
                got=", ".join(map(repr, unknown[:8])),
                allowed=", ".join(map(repr, trained.tolist()[:12])) + (", ..." if len(trained) > 12 else ""),
                hint="if a class has no training samples, state all: classes=[...], or return train, test, classes",
            )


def _require_two(names: list[str]) -> tuple[str, ...]:
    if len(names) != 2:
        raise UserError("bools have two classes", got=", ".join(map(repr, names)), allowed="two names: False, True")
    return tuple(names)


def encode_labels(labels: RawLabels, names: tuple[str, ...]) -> Tensor:
    """The number of each label's class, int64."""
    if labels.dtype.kind != "U":
        return torch.from_numpy(labels.astype(np.int64))
    numbers = {name: number for number, name in enumerate(names)}
    values, places = np.unique(labels, return_inverse=True)
    return torch.from_numpy(np.array([numbers[str(value)] for value in values], dtype=np.int64)[places])


def _names_of_numbers(classes: Any, found: list[int]) -> tuple[str, ...]:
    """`found`: the labels that occur, ascending."""
    num_labels = found[-1] + 1
    if num_labels > MOST_CLASSES:
        raise UserError(
            "a label is too large", got=found[-1], allowed=f"0 to {MOST_CLASSES - 1:,}: one number per class"
        )
    if classes is None:
        if found != list(range(num_labels)):
            _leave_gaps(found)
        return tuple(str(label) for label in range(max(2, num_labels)))
    if isinstance(classes, int) and not isinstance(classes, bool) and max(2, num_labels) <= classes <= MOST_CLASSES:
        return tuple(str(label) for label in range(classes))
    return tuple(_given_names(classes, max(2, num_labels)))


def _given_names(classes: Any, least: int) -> list[str]:
    if isinstance(classes, str) or not isinstance(classes, Sequence) or len(classes) < least:
        raise UserError(
            "the class names do not fit the labels",
            got=repr(classes),
            allowed=f"at least {least} names in a list, or the number of classes",
        )
    return distinct_names(classes)


def distinct_names(classes: Sequence[Any]) -> list[str]:
    names = [check_text(str(name), "the name of a class", where="class names") for name in classes]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UserError("a class name is given twice", where="class names", got=", ".join(map(repr, twice[:8])))
    return names


def _leave_gaps(labels: list[int]) -> NoReturn:
    """A class without samples is an error in the labels, unless the user says how many classes there are."""
    shown = ", ".join(map(str, labels[:12])) + (", ..." if len(labels) > 12 else "")
    raise UserError(
        "the labels leave out numbers",
        got=f"{len(labels)} different labels from {labels[0]} to {labels[-1]}: {shown}",
        allowed=f"0 to {len(labels) - 1} for {len(labels)} classes",
        hint="number them without gaps: np.unique(labels, return_inverse=True)[1];\n"
        f"or state the classes, if some have no samples: return train, test, {labels[-1] + 1}",
    )
