"""What a check finds: items that hold, and the first that does not, with its likely cause."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.course.lessons import Lesson


class Failed(Exception):
    """An item failed, and this is the likely cause."""

    def __init__(self, hint: str, what: str, advice: str) -> None:
        super().__init__(f"{hint}: {what}")
        self.hint = hint  # the cause's name: a typical wrong answer is tested against it
        self.what = what  # what was seen
        self.advice = advice  # why that happens, and where to look


@dataclass(frozen=True)
class Item:
    """One promise of the exercise. `check` raises Failed, or returns a remark for the screen."""

    title: str
    check: Callable[[Path], str | None]


@dataclass(frozen=True)
class Verdict:
    lesson: Lesson
    path: Path
    passed: list[str]
    failed: str = ""  # the title of the first item that failed
    failure: Failed | None = None
    remarks: list[str] = field(default_factory=list)

    @property
    def is_passed(self) -> bool:
        return self.failure is None


def find_gaps(path: Path) -> None:
    """A gap is a bare `...` in Python and `___` in a script; an unsolved exercise must never pass."""
    text = path.read_text(encoding="utf-8")
    is_gap = re.compile(r"(?!#(?!SBATCH)).*(?<!\w)___(?!\w)")  # not in a comment, of which #SBATCH is none
    lines = [number for number, line in enumerate(text.splitlines(), 1) if is_gap.match(line)]
    if path.suffix == ".py":
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise Failed(
                "syntax",
                f"Python cannot read your file: line {error.lineno}: {error.msg}",
                "Look at that line and the one above it: an open bracket, a missing colon, an indent that is off.",
            ) from error
        lines = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value is Ellipsis]
    if lines:
        numbers = sorted(set(lines))
        raise Failed(
            "gap",
            f"there is still a gap in line{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}",
            "Replace each gap by code of yours; the comment beside it says what belongs there.",
        )
