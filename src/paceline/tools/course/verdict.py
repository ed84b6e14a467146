"""The result of a check: items that passed, and the first that failed, with its cause."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.tools.course.lessons import Lesson


class Failed(Exception):
    """An item failed, with the cause that explains what was seen."""

    def __init__(self, hint: str, what: str, advice: str) -> None:
        super().__init__(f"{hint}: {what}")
        self.hint = hint  # the name of the cause; the tests compare it
        self.what = what  # what was seen
        self.advice = advice  # why this happens, and what to change


def cause_not_known(what: str, expected: str) -> Failed:
    """A result is wrong and fits none of the known mistakes: say what is expected, and guess nothing."""
    return Failed("cause-not-known", what, f"This check does not know the cause. Expected: {expected}")


def ranks_text(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


@dataclass(frozen=True)
class Item:
    """One requirement of the exercise. `check` raises Failed, or returns a remark for the screen."""

    title: str
    check: Callable[[Path], str | None]
    uses: tuple[str, ...] = ()  # names that must have no gaps before this check; empty: the whole file


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


def find_gaps(path: Path) -> dict[str, list[int]]:
    """Lines that still have a gap, by function or name; all lines of a script are under "".

    A gap is a bare `...` in Python and `___` in a script.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        is_gap = re.compile(r"(?!#(?!SBATCH)).*(?<!\w)___(?!\w)")  # not in a comment; #SBATCH is not a comment
        lines = [number for number, line in enumerate(text.splitlines(), 1) if is_gap.match(line)]
        return {"": lines} if lines else {}
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Failed(
            "syntax",
            f"Python cannot read your file: line {error.lineno}: {error.msg}",
            "Look at that line and the one above it: an open bracket, a missing colon, a wrong indent.",
        ) from error
    found: dict[str, list[int]] = {}
    for part in tree.body:
        lines = [n.lineno for n in ast.walk(part) if isinstance(n, ast.Constant) and n.value is Ellipsis]
        if lines:
            found[_name_of(part)] = sorted(set(lines))
    return found


def require_no_gaps(gaps: dict[str, list[int]], uses: tuple[str, ...] = ()) -> None:
    """Check the names that an item uses; an empty tuple means the whole file."""
    open_ones = {name: lines for name, lines in gaps.items() if name in uses or not uses}
    if not open_ones:
        return
    found = []
    for name, lines in open_ones.items():
        where = f"line{'' if len(lines) == 1 else 's'} {', '.join(map(str, lines))}"
        found.append(f"{f'`{name}` still has' if name else 'there is still'} a gap: {where}")
    raise Failed("gap", "\n".join(found), "Replace each gap by your code. The comment beside it says what is needed.")


def _name_of(part: ast.stmt) -> str:
    if isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
        return part.targets[0].id
    return part.name if isinstance(part, ast.FunctionDef) else ""
