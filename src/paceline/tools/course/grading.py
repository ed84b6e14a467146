"""Grade a file: the items of a lesson in order, until one fails."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from paceline.tools.course.lessons import Lesson
from paceline.tools.course.ranks import warm_up
from paceline.tools.course.verdict import Failed, Item, Verdict, find_gaps, require_no_gaps

_FIRST = "the file can be read, and is not an unchanged exercise"


def grade(lesson: Lesson, path: Path, on_passed: Callable[[str], None] = lambda title: None) -> Verdict:
    """Run the lesson's items on the student's file, up to the first that fails.

    An item needs only the functions that it uses, so a partly filled file can be checked too.
    """
    passed: list[str] = []
    remarks: list[str] = []

    def accept(title: str) -> None:
        passed.append(title)
        on_passed(title)

    try:
        gaps = find_gaps(path)
        if gaps == find_gaps(lesson.exercise):
            require_no_gaps(gaps)  # before torch is loaded, which takes seconds
    except Failed as failure:
        return Verdict(lesson, path, passed, _FIRST, failure)
    accept(_FIRST)
    if path.suffix == ".py":
        warm_up(lesson.modules)
    items: tuple[Item, ...] = importlib.import_module(f"paceline.tools.course.graders.{lesson.grader}").ITEMS
    for item in items:
        try:
            require_no_gaps(gaps, item.uses)
            remark = item.check(path)
        except Failed as failure:
            return Verdict(lesson, path, passed, item.title, failure, remarks)
        accept(item.title)
        remarks += [remark] if remark else []
    return Verdict(lesson, path, passed, remarks=remarks)
