"""`paceline course`: twelve lessons, and checks that run your file on real ranks."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paceline.cli.command import Command
from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED
from paceline.settings.declare import Arg
from paceline.tools.course.lessons import (
    DEFAULT,
    LESSONS,
    find_file,
    find_lesson,
    note_passed,
    read_passed,
    start,
    work_folder,
)

if TYPE_CHECKING:
    from paceline.tools.course.verdict import Verdict

_WIDTH = 100


@dataclass(frozen=True)
class Lessons:
    """List the lessons, and which of them you have passed.

    Distributed training on one laptop: each lesson has a page, a picture, questions and an exercise with gaps. A check
    takes seconds, ends a program that hangs, and names the likely cause of a wrong answer. It runs your code: check
    files you trust. Exit codes: 0 passed, 1 not yet, 2 a mistake in the command.
    """


@dataclass(frozen=True)
class Start:
    """Copy the exercises into a folder, for you to fill."""

    folder: Annotated[Path, Arg("DIR", place="word")] = DEFAULT
    """The folder."""


@dataclass(frozen=True)
class Show:
    """Read a lesson."""

    lesson: Annotated[str, Arg("N", place="word")]
    """Its number."""
    answers: bool = False
    """Show the answers to its questions."""
    solution: bool = False
    """Show the solution of its exercise."""


@dataclass(frozen=True)
class Check:
    """Run your file on real ranks, and say what is wrong with it."""

    lesson: Annotated[str, Arg("N", place="word")]
    """The number of the lesson."""
    file: Annotated[str | None, Arg(place="word", completes="file")] = None
    """Your file (the one of the exercises unless given)."""


def list_lessons(settings: Lessons) -> int:
    passed = read_passed()
    for lesson in LESSONS:
        when = f"passed {passed[lesson.number]}" if lesson.number in passed else ""
        print(f"{lesson.number:>3}  {lesson.title:<38} {when}".rstrip())
    following = next((lesson for lesson in LESSONS if lesson.number not in passed), None)
    print()
    if not any((work_folder() / lesson.file_name).is_file() for lesson in LESSONS):
        print("begin:  paceline course start")
    elif following is not None:
        print(f"next:   paceline course show {following.number}, then fill {work_folder() / following.file_name}")
    else:
        print("all lessons are passed")
    return EXIT_FINISHED


def start_course(settings: Start) -> int:
    folder = settings.folder
    new, kept = start(folder)
    if new:
        print(f"exercises copied to {folder}: {len(new)}")
    if kept:
        print(f"not changed, because they exist already: {len(kept)}")
    place = "" if folder == DEFAULT else f"cd {folder}; "
    print(f"next:   {place}paceline course show 1, then fill {new[0] if new else kept[0]}")
    return EXIT_FINISHED


def show(settings: Show) -> int:
    lesson = find_lesson(settings.lesson)
    from rich.console import Console

    console = Console(width=min(_WIDTH, shutil.get_terminal_size().columns), highlight=False)
    if settings.solution:
        console.print(lesson.solution.read_text(encoding="utf-8"), markup=False)
        return EXIT_FINISHED
    from rich.markdown import Markdown

    from paceline.tools.course.lessons import page_text

    console.print(Markdown(page_text(lesson, has_answers=settings.answers), hyperlinks=False))
    console.print(f"\nnext:   fill {work_folder() / lesson.file_name}, then paceline course check {lesson.number}")
    return EXIT_FINISHED


# --- A check and its screen -------------------------------------------------------------------------------------------


def check(settings: Check) -> int:
    lesson = find_lesson(settings.lesson)
    path = find_file(lesson, settings.file)
    from paceline.tools.course.grading import grade

    print(f"lesson {lesson.number}: {lesson.title}  ({path})", flush=True)
    verdict = grade(lesson, path, lambda title: print(f"  ok      {title}", flush=True))
    for line in _rest_of_screen(verdict):
        print(line)
    if verdict.is_passed:
        note_passed(lesson, path)
    return EXIT_FINISHED if verdict.is_passed else EXIT_DIFFERENT


def _rest_of_screen(verdict: Verdict) -> list[str]:
    lesson, failure = verdict.lesson, verdict.failure
    lines = [line for remark in verdict.remarks for line in _labelled("note", remark)]
    if failure is None:
        after = next((other for other in LESSONS if other.number == lesson.number + 1), None)
        following = f"next: paceline course show {after.number}" if after else "that was the last lesson"
        return [*lines, f"passed; {following}"]
    return [
        *lines,
        *_labelled("not yet", verdict.failed),
        *_labelled("seen", failure.what),
        *_labelled("hint", f"{failure.advice} [{failure.hint}]"),
        *_labelled("read", f"paceline course show {lesson.number}"),
    ]


def _labelled(label: str, text: str) -> list[str]:
    """Text wrapped beside its label. Lines of the text are kept."""
    width = max(40, min(_WIDTH, shutil.get_terminal_size().columns)) - 10
    wrapped = [part for line in text.splitlines() for part in textwrap.wrap(line, width, break_on_hyphens=False)]
    return [f"  {label if number == 0 else '':<7} {line}" for number, line in enumerate(wrapped)]


COMMANDS = (
    Command("course", Lessons, list_lessons),
    Command("course list", Lessons, list_lessons),
    Command("course start", Start, start_course),
    Command("course show", Show, show),
    Command("course check", Check, check),
)
