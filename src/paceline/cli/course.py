"""`paceline course`: ten lessons, and checks that run a person's own file on real ranks."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED, UserError
from paceline.tools.course.desk import DEFAULT, find_desk, find_file, note_passed, read_passed, start
from paceline.tools.course.lessons import LESSONS, Lesson, find_lesson

if TYPE_CHECKING:
    from paceline.tools.course.verdict import Verdict

_USAGE = f"""\
usage: paceline course                      the lessons, and which of them you have passed
       paceline course start [DIR]          copy the exercises into DIR ({DEFAULT}), for you to fill
       paceline course show N               read lesson N; --answers unfolds its questions, --solution shows the code
       paceline course check N [FILE]       run your file on real ranks, and say what is wrong with it

Distributed training on one laptop, lesson by lesson: a page, a picture, questions, an exercise with gaps. A check takes
seconds, ends what hangs, and tells the likely cause of a wrong answer. It runs your code: check files you trust.
Exit codes: 0 passed, 1 not yet, 2 a mistake in the command.
"""
_WIDTH = 100


def run(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return EXIT_FINISHED
    verb, *words = arguments or ["list"]
    if verb == "list" and not words:
        return _list()
    if verb == "start" and len(words) <= 1 and not any(word.startswith("-") for word in words):
        return _start(Path(words[0]) if words else DEFAULT)
    if verb == "show" and words:
        return _show(words)
    if verb == "check" and 1 <= len(words) <= 2:
        lesson = find_lesson(words[0])
        return _check(lesson, find_file(lesson, words[1] if len(words) == 2 else None))
    allowed = "paceline course [list | start [DIR] | show N [--answers] [--solution] | check N [FILE]]"
    raise UserError("the course does not know this", got=" ".join(arguments), allowed=allowed)


def _list() -> int:
    passed = read_passed()
    for lesson in LESSONS:
        when = f"passed {passed[lesson.number]}" if lesson.number in passed else ""
        print(f"{lesson.number:>3}  {lesson.title:<38} {when}".rstrip())
    following = next((lesson for lesson in LESSONS if lesson.number not in passed), None)
    print()
    if not any((find_desk() / lesson.file_name).is_file() for lesson in LESSONS):
        print("begin:  paceline course start")
    elif following is not None:
        print(f"next:   paceline course show {following.number}, then fill {find_desk() / following.file_name}")
    else:
        print("all ten: that was the course")
    return EXIT_FINISHED


def _start(folder: Path) -> int:
    new, kept = start(folder)
    if new:
        print(f"{len(new)} exercises are in {folder}")
    if kept:
        print(f"{len(kept)} were there already and stay as they are")
    place = "" if folder == DEFAULT else f"cd {folder}; "
    print(f"next:   {place}paceline course show 1, then fill {new[0] if new else kept[0]}")
    return EXIT_FINISHED


def _show(words: list[str]) -> int:
    flags = {word for word in words if word.startswith("-")}
    numbers = [word for word in words if not word.startswith("-")]
    if len(numbers) != 1 or flags - {"--answers", "--solution"}:
        raise UserError("give one lesson", got=" ".join(words), allowed="show N [--answers] [--solution]")
    lesson = find_lesson(numbers[0])
    from rich.console import Console

    console = Console(width=min(_WIDTH, shutil.get_terminal_size().columns), highlight=False)
    if "--solution" in flags:
        console.print(lesson.solution.read_text(encoding="utf-8"), markup=False)
        return EXIT_FINISHED
    from rich.markdown import Markdown

    from paceline.tools.course.page import page_text

    console.print(Markdown(page_text(lesson, has_answers="--answers" in flags), hyperlinks=False))
    console.print(f"\nnext:   fill {find_desk() / lesson.file_name}, then paceline course check {lesson.number}")
    return EXIT_FINISHED


# --- A check and its screen -------------------------------------------------------------------------------------------


def _check(lesson: Lesson, path: Path) -> int:
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
    """Wrapped beside its label; the text's own lines are kept."""
    width = max(40, min(_WIDTH, shutil.get_terminal_size().columns)) - 10
    wrapped = [part for line in text.splitlines() for part in textwrap.wrap(line, width, break_on_hyphens=False)]
    return [f"  {label if number == 0 else '':<7} {line}" for number, line in enumerate(wrapped)]
