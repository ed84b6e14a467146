"""Grading: a lesson's items in order, until one fails."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from paceline.course.lessons import Lesson
from paceline.course.ranks import warm_up
from paceline.course.verdict import Failed, Item, Verdict, find_gaps


def grade(lesson: Lesson, path: Path, tell_passed: Callable[[str], None] = lambda title: None) -> Verdict:
    """Run the lesson's items on the person's file, up to the first that fails."""
    gaps = Item("the file is complete", find_gaps)
    try:
        gaps.check(path)
    except Failed as failure:  # told at once: loading torch takes seconds
        return Verdict(lesson, path, [], gaps.title, failure)
    tell_passed(gaps.title)
    if path.suffix == ".py":
        warm_up()
    items: tuple[Item, ...] = importlib.import_module(f"paceline.course.graders.{lesson.grader}").ITEMS
    passed = [gaps.title]
    remarks: list[str] = []
    for item in items:
        try:
            remark = item.check(path)
        except Failed as failure:
            return Verdict(lesson, path, passed, item.title, failure, remarks)
        passed.append(item.title)
        tell_passed(item.title)
        remarks += [remark] if remark else []
    return Verdict(lesson, path, passed, remarks=remarks)
