"""mirror.json of a run folder: the store that the run is mirrored to, the start that writes there, and its progress."""

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
    token: str = ""  # of the last start from this folder; the start whose token is in the store may write
    keep_last: int = 1
    keep_best: int = 1
    says: str = ""  # for people: up to date, or behind

    def write(self, folder: Path) -> None:
        write_json(folder / MIRROR_NOTE, asdict(self))


def read_own_note(folder: Path) -> MirrorNote | None:
    """The note of a working copy. None for a run without a store, and for any other folder with a note.

    A copy of a working copy would overwrite the store of the original. A folder from elsewhere could name any store
    that this user may write to. So the URL counts only if its working copy is this folder.
    """
    note = read_note(folder)
    try:
        is_own = note is not None and local_path(note.url).resolve() == folder.resolve()
    except (UserError, OSError, ValueError):  # no URL of a run
        return None
    return note if is_own else None


def read_note(folder: Path) -> MirrorNote | None:
    """The content of the file. Only `read_own_note` may be trusted."""
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
