"""Checkpoints on another disk: a `checkpoints` that links out of its run folder belongs to one run folder.

The lock is in the run folder. After `cp -r`, two run folders share one linked checkpoints folder, and each would
delete checkpoints of the other. So a mark file in the checkpoints folder names the run folder that uses it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.settings.small_files import open_plain, parse_json, read_small

MARK = ".run-folder.json"
_LARGEST_BYTES = 100_000
_SIGNS_OF_A_RUN = ("config.yaml", "status.json", "run.lock", "run.owner")


def claim_linked_checkpoints(folder: Path) -> None:
    """The owner of the run folder calls this before it writes. Raises UserError if another run folder uses them."""
    checkpoints = folder / "checkpoints"
    if not _leads_out(checkpoints):
        return
    try:
        _write_mark(folder, checkpoints / MARK)
    except OSError as error:
        raise UserError(
            "the checkpoints folder cannot be written",
            where=str(checkpoints.resolve()),
            got=error.strerror,
            hint="--output-dir PATH",
        ) from error


def _write_mark(folder: Path, mark: Path) -> None:
    descriptor = open_plain(mark, os.O_RDWR)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        refuse_checkpoints_of_another_run(folder)  # while the mark is locked: another run may start now
        content = {"folder": str(folder.resolve()), "inode": folder.stat().st_ino, "host": socket.gethostname()}
        os.ftruncate(descriptor, 0)
        os.write(descriptor, (json.dumps(content) + "\n").encode())
    finally:
        os.close(descriptor)


def refuse_checkpoints_of_another_run(folder: Path) -> None:
    """Raises UserError. Writes nothing."""
    checkpoints = folder / "checkpoints"
    if not _leads_out(checkpoints):
        return
    target = checkpoints.resolve()
    home = target.parent
    if target.name == "checkpoints" and home != folder.resolve() and any((home / n).exists() for n in _SIGNS_OF_A_RUN):
        raise _refusal(checkpoints, str(home))
    mark = _read_mark(checkpoints)
    named = Path(str(mark.get("folder", "")))
    if not mark or _is_same(named, folder):
        return
    if _exists(named):
        if _is_same(named / "checkpoints", checkpoints):
            raise _refusal(checkpoints, str(named))
        return  # it was moved, or uses other checkpoints now
    # A moved run folder keeps its inode. On another host the path alone proves nothing.
    if mark.get("inode") != folder.stat().st_ino and mark.get("host") != socket.gethostname():
        hint = f"if no run folder there uses them any more: rm {checkpoints / MARK}"
        raise _refusal(checkpoints, f"{named} on {mark.get('host')}", hint)


def _leads_out(checkpoints: Path) -> bool:
    """Whether the folder is a link or a mount point."""
    if not checkpoints.is_dir():
        return False
    return checkpoints.is_symlink() or checkpoints.stat().st_dev != checkpoints.parent.stat().st_dev


def _read_mark(checkpoints: Path) -> dict[str, Any]:
    """Empty if there is none."""
    try:
        mark = parse_json(read_small(checkpoints / MARK, _LARGEST_BYTES, follows_links=False))
    except (FileNotFoundError, ValueError):
        return {}
    return mark if isinstance(mark, dict) and mark.get("folder") else {}


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except (OSError, ValueError):  # ValueError: not a path
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a path
        return False


def _refusal(checkpoints: Path, owner: str, hint: str = "") -> UserError:
    lines = ["link it to a separate folder, or give another --output-dir", hint]
    return UserError(
        "the checkpoints of this run folder belong to another run",
        where=f"{checkpoints} -> {checkpoints.resolve()}",
        got=owner,
        hint="\n".join(line for line in lines if line),
    )
