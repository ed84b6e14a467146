"""Drafts: what a file of a run folder is written to before it gets its name in one move.

A draft's name says that it is ours and which process writes it. Its random part keeps others from putting a link there
first.
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
    """A new name beside `path`. What is left of a killed process is removed by the next owner of the folder."""
    return path.with_name(f".{path.name}.{pid or os.getpid()}-{secrets.token_hex(8)}.paceline-draft")


def write_draft(draft: Path, content: bytes) -> None:
    """A new file. A name that is there already, also a link, is an OSError."""
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, memoryview(content))
    finally:
        os.close(descriptor)


def remove_drafts(folder: Path) -> None:
    """Remove what killed processes left of files they were about to replace. Processes of this host may be alive."""
    for path in folder.glob(".*.paceline-draft"):
        found = _DRAFT.fullmatch(path.name)
        if found is None or THIS_MACHINE.exists(int(found["pid"])):
            continue
        with suppress(FileNotFoundError):
            if stat.S_ISREG(path.lstat().st_mode):
                path.unlink()
