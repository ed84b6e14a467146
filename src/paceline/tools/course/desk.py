"""A student's folder for the course: copies of the exercises, and the lessons that were passed."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

from paceline.errors import UserError
from paceline.settings.small_files import read_json_object
from paceline.tools.course.lessons import LESSONS, Lesson

DEFAULT = Path("course-work")
_PROGRESS = "progress.json"


def start(folder: Path) -> tuple[list[Path], list[Path]]:
    """Copy the exercises. Returns the new files, and those that exist already and are not changed."""
    if folder.exists() and not folder.is_dir():
        raise UserError("the folder for the course is a file", got=str(folder), hint="paceline course start ANOTHER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new: list[Path] = []
        kept: list[Path] = []
        for lesson in LESSONS:
            target = folder / lesson.file_name
            (kept if target.exists() else new).append(target)
            if not target.exists():
                shutil.copyfile(lesson.exercise, target)
    except OSError as error:
        raise UserError("the exercises cannot be written there", where=str(folder), got=error.strerror) from error
    return new, kept


def find_desk() -> Path:
    """The folder with the copies: the current one, or the default folder of `start`."""
    if any((Path() / lesson.file_name).is_file() for lesson in LESSONS):
        return Path()
    return DEFAULT


def find_file(lesson: Lesson, given: str | None) -> Path:
    """The student's file for a lesson, checked to be a readable text file."""
    path = Path(given) if given else find_desk() / lesson.file_name
    if not path.is_file():
        hint = "paceline course start copies the exercises into course-work/" if given is None else None
        what = "that is a folder" if path.is_dir() else "there is no such file"
        raise UserError(f"lesson {lesson.number}: {what}", where=str(path), hint=hint)
    if path.suffix != lesson.suffix:
        raise UserError(
            f"lesson {lesson.number} is checked with another kind of file", got=path.name, allowed=f"*{lesson.suffix}"
        )
    try:
        path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("this file cannot be read as text", where=str(path), got=error) from error
    return path


def read_passed() -> dict[int, str]:
    """The passed lessons, each with its time."""
    try:
        content = read_json_object(find_desk() / _PROGRESS)
        return {int(number): str(when) for number, when in content["passed"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def note_passed(lesson: Lesson, path: Path) -> None:
    """Record a passed lesson. Only the copy in the course folder counts, not other files that are checked."""
    desk = find_desk()
    if path.resolve() != (desk / lesson.file_name).resolve():
        return
    passed = {**read_passed(), lesson.number: datetime.now().isoformat(" ", "minutes")}
    text = json.dumps({"passed": {str(number): passed[number] for number in sorted(passed)}}, indent=2)
    temporary = desk / f".{_PROGRESS}"
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(desk / _PROGRESS)
