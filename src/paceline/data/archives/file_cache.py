"""A bounded cache of data files on this machine, shared by all ranks and runs that name the same folder. No torch.

A file is written under another name and renamed when it is complete, so a killed process leaves no part of a file that
is used. Its name is a hash of its origin, size and version, so a changed file is another file. When the cache is full,
files that were not used for the longest time are removed; a process that reads one of them at this moment is not
disturbed. A full disk is no error: the file is not kept, and the caller reads the origin.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import IO

from paceline.data.archives.places import read_at
from paceline.runs.drafts import draft_of, remove_drafts

_SUFFIX = ".data"
_RESERVED = ".reserved"
_LOCKS = 64
_SPARE_BYTES = 256 * 2**20  # of the disk: for checkpoints and logs
_USED_LATELY_S = 600.0  # files of other runs that were used within this time are not removed
_SWEEP_EVERY_S = 2.0
_MOST_OPEN_FILES = 256
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


class Outcome(StrEnum):
    KEPT = "kept"
    BUSY = "busy"  # another process writes this file
    FULL = "full"  # no room, or the folder cannot be written


class OpenFile:
    """Is closed when no thread has it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_used = True

    def __del__(self) -> None:
        os.close(self.descriptor)


class FileCache:
    """Safe to use from several threads and processes."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self.limit_bytes = limit_bytes
        self._opened: dict[str, OpenFile] = {}
        self._swept = time.monotonic()

    def read(self, key: str, start: int, size: int) -> bytes | None:
        """Bytes of a file; None if it is not here, or on a disk that fails."""
        try:
            if time.monotonic() - self._swept > _SWEEP_EVERY_S:
                self._sweep()
            found = self._opened.get(key) or self._open(key)
            if found is None:
                return None
            found.is_used = True
            return read_at(found.descriptor, start, size)
        except OSError:  # the origin can still be read
            self.drop(key)
            return None

    def open(self, key: str) -> IO[bytes] | None:
        """None if it is not here."""
        try:
            return self._path(key).open("rb")
        except OSError:
            return None

    def _open(self, key: str) -> OpenFile | None:
        try:
            found = OpenFile(os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None
        if len(self._opened) < _MOST_OPEN_FILES:
            self._opened[key] = found
        return found

    def _sweep(self) -> None:
        """Close removed files, so that their space is free, and note which ones are in use."""
        self._swept = time.monotonic()
        for key, found in list(self._opened.items()):
            if os.fstat(found.descriptor).st_nlink == 0:
                self._opened.pop(key, None)
            elif found.is_used:
                found.is_used = False
                with suppress(OSError):  # of a cache that only others may write
                    os.utime(self._path(key))

    def holds(self, key: str) -> bool:
        """Whether it can be read. A file of another user with a strict umask cannot, and is replaced."""
        return os.access(self._path(key), os.R_OK)

    def drop(self, key: str) -> None:
        self._opened.pop(key, None)
        with suppress(OSError):
            self._path(key).unlink()

    def add(
        self, key: str, size_bytes: int, write: Callable[[Path], object], *, own: Collection[str], keep: Collection[str]
    ) -> Outcome:
        """Make a file with `write`, which fills the given path. Its errors are raised, except for a full disk.

        `own`: the files of this data set. Of these, all but `keep` may be removed at once.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _lock(self._folder / f"writing-{int(key[:8], 16) % _LOCKS:02}.lock", waits=False) as is_mine:
                if self.holds(key):
                    return Outcome.KEPT
                return self._write(key, size_bytes, write, own, keep) if is_mine else Outcome.BUSY
        except OSError as error:
            if error.errno in _NO_SPACE or isinstance(error, NotADirectoryError | FileExistsError):
                return Outcome.FULL
            is_gone = isinstance(error, FileNotFoundError) and str(error.filename).startswith(str(self._folder))
            if is_gone or not self._folder.is_dir():
                return Outcome.FULL  # the folder was deleted at this moment; the next file makes it again
            raise

    def _write(
        self, key: str, size_bytes: int, write: Callable[[Path], object], own: Collection[str], keep: Collection[str]
    ) -> Outcome:
        path = self._path(key)
        draft, reservation = draft_of(path), draft_of(self._folder / f"{key}{_RESERVED}")
        with self._room_lock():
            remove_drafts(self._folder)
            if not self._make_room(size_bytes, own, keep):
                return Outcome.FULL
            with draft.open("xb"), reservation.open("xb") as file:
                file.truncate(size_bytes)  # others count it from now on
        try:
            write(draft)
            os.utime(draft)
            with self._room_lock():  # a count sees either the reservation or the file
                draft.replace(path)
                reservation.unlink()
        finally:
            draft.unlink(missing_ok=True)
            reservation.unlink(missing_ok=True)
        return Outcome.KEPT

    def _room_lock(self) -> AbstractContextManager[bool]:
        return _lock(self._folder / "room.lock", waits=True)

    def _make_room(self, size_bytes: int, own: Collection[str], keep: Collection[str]) -> bool:
        about = []
        for entry in os.scandir(self._folder):
            with suppress(FileNotFoundError):  # removed at this moment
                about.append((entry.stat(), entry.name))
        about.sort(key=lambda item: item[0].st_mtime)
        # A file that is being written counts with its reservation. How much of it is on the disk changes all the time.
        drafts = [stat for stat, name in about if f"{_SUFFIX}." in name]
        reserved = sum(stat.st_size for stat, name in about if f"{_RESERVED}." in name)
        used = reserved + sum(stat.st_size for stat, name in about if name.endswith(_SUFFIX))
        unwritten = max(0, reserved - sum(512 * stat.st_blocks for stat in drafts))
        disk = shutil.disk_usage(self._folder).free - unwritten - _SPARE_BYTES
        excess = max(used + size_bytes - self.limit_bytes, size_bytes - disk)
        removable = []
        for stat, name in about:
            key = name.removesuffix(_SUFFIX)
            is_old = time.time() - stat.st_mtime > _USED_LATELY_S
            if name.endswith(_SUFFIX) and key not in keep and (key in own or is_old):
                removable.append((stat.st_size, key))
        if sum(size for size, _ in removable) < excess:
            return False
        for size, key in removable:
            if excess <= 0:
                break
            self.drop(key)
            excess -= size
        return True

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"


@contextmanager
def _lock(path: Path, *, waits: bool) -> Iterator[bool]:
    """Whether this process has the lock. On a file system without locks: always."""
    with path.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
        yield True
