"""Tags and a note that users put on a run: `notes.json` in its folder. Training never changes it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import UserError, printable_line
from paceline.runs.folder import write_json
from paceline.runs.json_files import Fields, ListOf, read_object
from paceline.settings.text import check_text

NOTES = "notes.json"
_SHAPE = Fields(optional={"tags": ListOf(str, drops=True), "note": str})
_TAG = re.compile(r"[\w][\w.+/-]{0,39}")


@dataclass(frozen=True)
class Notes:
    tags: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        return "  ".join([*(f"#{tag}" for tag in self.tags), *([self.note] if self.note else [])])


def read_notes(folder: Path) -> Notes:
    """Empty if the file is missing or invalid. The text is not trusted: control characters are removed."""
    content = read_object(folder / NOTES, _SHAPE)
    return Notes(tuple(map(printable_line, content.get("tags", ()))), printable_line(content.get("note", "")))


def write_notes(folder: Path, notes: Notes) -> None:
    check_text(notes.note, "the note")
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
