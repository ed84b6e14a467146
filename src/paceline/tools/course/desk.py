"""A person's folder for the course: their copies of the exercises, and what they have passed."""

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
    """Copy the exercises; returns what is new and what was there already and is left alone."""
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
    """Where the person's copies are: here, or in the folder that `start` makes unless told otherwise."""
    if any((Path() / lesson.file_name).is_file() for lesson in LESSONS):
        return Path()
    return DEFAULT


def find_file(lesson: Lesson, given: str | None) -> Path:
    """The person's file for a lesson, readable."""
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
    """Lessons that were passed, and when."""
    try:
        content = read_json_object(find_desk() / _PROGRESS)
        return {int(number): str(when) for number, when in content["passed"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def note_passed(lesson: Lesson, path: Path) -> None:
    """Only the person's own copy counts: another file that passes is somebody else's progress."""
    desk = find_desk()
    if path.resolve() != (desk / lesson.file_name).resolve():
        return
    passed = {**read_passed(), lesson.number: datetime.now().isoformat(" ", "minutes")}
    text = json.dumps({"passed": {str(number): passed[number] for number in sorted(passed)}}, indent=2)
    temporary = desk / f".{_PROGRESS}"
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(desk / _PROGRESS)
