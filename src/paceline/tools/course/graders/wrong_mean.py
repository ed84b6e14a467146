"""Lesson 6, diagnosis: an example that shows a wrong mean over ranks, and the repaired function."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.tools.course.lessons import find_lesson
from paceline.tools.course.ranks import on_ranks, require_values, try_ranks
from paceline.tools.course.verdict import Failed, Item, cause_not_known

Values = tuple[list[float], list[float]]  # of rank 0 and of rank 1
_UNEQUAL: Values = ([1.0, 2.0, 3.0], [6.0])
_ONE_EMPTY: Values = ([4.0, 8.0], [])


def _read_answers(person: ModuleType, rank: int, world_size: int) -> dict[str, Any]:
    return {name: getattr(person, name) for name in ("EXAMPLE", "RETURNED_MEAN", "TRUE_MEAN")}


def _mean(person: ModuleType, rank: int, world_size: int, values: Values) -> float:
    return float(person.mean_over_ranks(list(values[rank])))


def _true_mean(values: Values) -> float:
    return sum(map(sum, values)) / sum(map(len, values))


def _is_close(found: Any, right: float) -> bool:
    # People write decimal numbers, and sums of floats may be formed in any order.
    return isinstance(found, int | float) and math.isclose(found, right, abs_tol=1e-3)


def check_example(path: Path) -> str:
    answers = on_ranks(path, 1, _read_answers)[0]
    example = answers["EXAMPLE"]
    if not _is_example(example):
        raise Failed(
            "no-example",
            f"EXAMPLE is {example!r}",
            "Two lists of numbers, the values of rank 0 and of rank 1. Each has at least one number: ([1.0], [2.0]).",
        )
    # The function as the exercise gives it, on two ranks.
    returned = on_ranks(find_lesson("6").exercise, 2, _mean, example)[0]
    true = _true_mean(example)
    what = f"for {example} the defective function returns {returned:g}; the true mean is {true:g}"
    if _is_close(returned, true):
        raise Failed(
            "example-shows-nothing",
            what,
            "This example does not show the defect. What does the function divide by, and when? Try ranks with "
            "different numbers of values.",
        )
    if not _is_close(answers["TRUE_MEAN"], true):
        raise Failed(
            "wrong-true-mean", f"{what}; TRUE_MEAN is {answers['TRUE_MEAN']}", "All values, divided by their number."
        )
    if not _is_close(answers["RETURNED_MEAN"], returned):
        raise Failed(
            "wrong-prediction",
            f"{what}; RETURNED_MEAN is {answers['RETURNED_MEAN']}",
            "Follow both ranks line by line: what does each have before all_reduce, and what after it?",
        )
    return what


def _is_example(example: Any) -> bool:
    return (
        isinstance(example, tuple | list)
        and len(example) == 2
        and all(isinstance(values, tuple | list) and values for values in example)
        and all(isinstance(value, int | float) for values in example for value in values)
    )


def check_repair(path: Path) -> None:
    for values in (_UNEQUAL, _ONE_EMPTY):
        endings = try_ranks(path, 2, _mean, values)
        what = f"for {values[0]} on rank 0 and {values[1]} on rank 1"
        if not values[1] and any(ending.kind == "error" and "ZeroDivision" in ending.value for ending in endings):
            raise Failed(
                "empty-rank",
                f"{what} a rank divides by 0",
                "A rank may have no values. Divide after the sum over ranks.",
            )
        found = require_values(endings)
        right = _true_mean(values)
        if all(_is_close(mean, right) for mean in found):
            continue
        what = f"{what} the ranks return {found}, not {right:g}"
        if values[1] and all(_is_close(mean, sum(own) / len(own)) for mean, own in zip(found, values, strict=True)):
            raise Failed(
                "own-values-only", what, "Each rank returns the mean of its own values. Add up over ranks first."
            )
        if any(math.isnan(mean) for mean in found):
            raise Failed("empty-rank", what, "A rank may have no values. Divide after the sum over ranks.")
        if all(_is_close(mean, sum(sum(own) / len(own) for own in values) / 2) for mean in found if values[1]):
            raise Failed(
                "mean-of-means",
                what,
                "It is still the mean of the ranks' means. Add up the values and their numbers first.",
            )
        raise cause_not_known(what, "the sum of all values, divided by the number of all values, on every rank.")


ITEMS = (
    Item("diagnosis: the example shows the wrong mean", check_example, ("EXAMPLE", "RETURNED_MEAN", "TRUE_MEAN")),
    Item("the mean over ranks is repaired, also if a rank has no values", check_repair, ("mean_over_ranks",)),
)
