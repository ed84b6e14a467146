"""mirror.json of a run folder: which store the run is mirrored to, by whom, and how far that has come."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from paceline.runs.folder import MIRROR_NOTE, write_json


@dataclass(frozen=True)
class MirrorNote:
    url: str
    token: str = ""  # of the last start that wrote to the store from here; whoever's token lies there may write
    keep_last: int = 1
    keep_best: int = 1
    says: str = ""  # for people: in step, or behind

    def write(self, folder: Path) -> None:
        write_json(folder / MIRROR_NOTE, asdict(self))


def read_note(folder: Path) -> MirrorNote | None:
    """None for a run that lives on this disk only."""
    try:
        return parse_note((folder / MIRROR_NOTE).read_text(encoding="utf-8"))
    except OSError:
        return None


def parse_note(text: str) -> MirrorNote | None:
    try:
        values = dict(json.loads(text))
        known = {field.name: values[field.name] for field in fields(MirrorNote) if field.name in values}
        return MirrorNote(**known)
    except (ValueError, TypeError):
        return None
