"""mirror.json of a run folder: the store to which the run is mirrored, the writer's token, and the progress."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from paceline.errors import UserError
from paceline.runs.file_shapes import MIRROR
from paceline.runs.folder import MIRROR_NOTE, write_json
from paceline.runs.json_files import fit, read_bounded
from paceline.runs.stores import local_path
from paceline.settings.small_files import parse_json

_LARGEST_NOTE_BYTES = 100_000


@dataclass(frozen=True)
class MirrorNote:
    url: str
    token: str = ""  # of the last start that wrote from here; a start may write while the store has its token
    keep_last: int = 1
    keep_best: int = 1
    says: str = ""  # for the user: up to date, or behind

    def write(self, folder: Path) -> None:
        write_json(folder / MIRROR_NOTE, asdict(self))


def read_own_note(folder: Path) -> MirrorNote | None:
    """The note of a working copy. None for a run without a store, and for a note that is not valid in this folder.

    A copy of a working copy would overwrite the store of the original. A folder from another person could name any
    store that this user may write to. So a URL is valid only if its working copy is this folder.
    """
    note = read_note(folder)
    try:
        is_own = note is not None and local_path(note.url).resolve() == folder.resolve()
    except (UserError, OSError, ValueError):  # not the URL of a run
        return None
    return note if is_own else None


def read_note(folder: Path) -> MirrorNote | None:
    """The note in the file. Use `read_own_note` to check that it is valid here."""
    try:
        return parse_note(read_bounded(folder / MIRROR_NOTE, _LARGEST_NOTE_BYTES))
    except (OSError, ValueError):
        return None


def parse_note(text: bytes | str) -> MirrorNote | None:
    try:
        values = fit(parse_json(text), MIRROR)
    except ValueError:
        return None
    return MirrorNote(**{field.name: values[field.name] for field in fields(MirrorNote) if field.name in values})
