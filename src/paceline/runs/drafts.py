"""Drafts: temporary files that are renamed to files of a run folder.

A draft's name shows that it is Paceline's and which process writes it. A random part makes the name unpredictable, so
another user cannot place a link there.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from paceline.runs.machine import THIS_MACHINE
from paceline.settings.small_files import write_all

_DRAFT = re.compile(r"\..+\.(?P<pid>[0-9]{1,10})-[0-9a-f]{16}\.paceline-draft")


def draft_of(path: Path, pid: int | None = None) -> Path:
    """A new name in the same folder. The next owner of the folder removes drafts of killed processes."""
    return path.with_name(f".{path.name}.{pid or os.getpid()}-{secrets.token_hex(8)}.paceline-draft")


def write_draft(draft: Path, content: bytes) -> None:
    """Create a new file. Raises OSError if the name exists, also as a link."""
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, memoryview(content))
    finally:
        os.close(descriptor)


def remove_drafts(folder: Path) -> None:
    """Remove drafts of killed processes. Drafts of processes that still run on this host are kept."""
    for path in abandoned_drafts(folder):
        with suppress(FileNotFoundError):
            if stat.S_ISREG(path.lstat().st_mode):
                path.unlink()


def abandoned_drafts(folder: Path) -> list[Path]:
    """Drafts, files or folders, whose process does not run on this host any more."""
    found = [(path, _DRAFT.fullmatch(path.name)) for path in folder.glob(".*.paceline-draft")]
    return [path for path, match in found if match and not THIS_MACHINE.exists(int(match["pid"]))]
