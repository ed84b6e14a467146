"""Tags and a note that people put on a run: `notes.json` in its folder, which training never touches."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.runs.folder import write_json

NOTES = "notes.json"
_TAG = re.compile(r"[\w][\w.+/-]{0,39}")


@dataclass(frozen=True)
class Notes:
    tags: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        return "  ".join([*(f"#{tag}" for tag in self.tags), *([self.note] if self.note else [])])


def read_notes(folder: Path) -> Notes:
    """Nothing, where there are none or somebody broke the file."""
    try:
        content = json.loads((folder / NOTES).read_text(encoding="utf-8"))
        return Notes(tuple(str(tag) for tag in content.get("tags", ())), str(content.get("note", "")))
    except (OSError, ValueError, AttributeError, TypeError):
        return Notes()


def write_notes(folder: Path, notes: Notes) -> None:
    try:
        if notes == Notes():
            (folder / NOTES).unlink(missing_ok=True)
        else:
            write_json(folder / NOTES, asdict(notes))
    except OSError as error:
        raise UserError("the run folder cannot be written", where=str(folder), got=error.strerror) from error


def check_tag(tag: str) -> str:
    if not _TAG.fullmatch(tag):
        raise UserError(
            "this cannot be a tag",
            got=repr(tag),
            allowed="up to 40 letters, digits and _ . + / -, beginning with a letter or digit",
            hint='text goes into a note: paceline runs note RUN "text"',
        )
    return tag
