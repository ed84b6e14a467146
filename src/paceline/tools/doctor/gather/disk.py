"""Facts about a folder of training: permissions, free space, speed, and the clock of its disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

_PROBE_BYTES = 32 * 2**20
_MOST_WRITE_S = 3.0
_FSYNCS = 3


@dataclass(frozen=True)
class Place:
    path: str
    stands_in: str  # the folder itself, or its nearest existing parent
    exists: bool
    is_empty: bool = True
    error: str = ""  # why it cannot be written
    free_bytes: int = 0
    free_files: int | None = None  # None: this file system does not count them
    filesystem: str = ""
    write_bytes_per_s: float | None = None  # None: not measured
    fsync_s: float | None = None
    clock_ahead_s: float | None = None  # the file system's clock minus ours


def gather_place(path: Path, clock: Callable[[], float] = time.time, *, measures: bool = True) -> Place:
    """Writes a probe file into the folder, or its nearest existing parent, and removes it."""
    whole = path.expanduser().absolute()
    stands_in = next((folder for folder in (whole, *whole.parents) if folder.exists()), Path("/"))
    place = Place(path=str(path), stands_in=str(stands_in), exists=stands_in == whole)
    if not stands_in.is_dir():
        return replace(place, error="it is a file, not a folder")
    try:
        is_empty = stands_in != whole or not any(whole.iterdir())
    except OSError as error:
        return replace(place, error=f"it cannot be read: {error.strerror}")
    room, files = shutil.disk_usage(stands_in), os.statvfs(stands_in)
    place = replace(
        place,
        is_empty=is_empty,
        free_bytes=room.free,
        free_files=files.f_favail if files.f_files else None,
        filesystem=_filesystem(stands_in),
    )
    try:
        return _write_probe(place, min(_PROBE_BYTES, room.free // 2) if measures else 0, clock)
    except OSError as error:
        return replace(place, error=error.strerror or str(error))


def _write_probe(place: Place, size: int, clock: Callable[[], float]) -> Place:
    block = os.urandom(2**20)
    handle, name = tempfile.mkstemp(prefix=".paceline-doctor-", dir=place.stands_in)
    try:
        asked_at = clock()
        os.write(handle, b"probe")
        os.fsync(handle)
        ahead = os.fstat(handle).st_mtime - (asked_at + clock()) / 2
        place = replace(place, clock_ahead_s=ahead)
        if size < len(block):
            return place
        written, started = 0, time.perf_counter()
        while written < size and time.perf_counter() - started < _MOST_WRITE_S:
            written += os.write(handle, block)
        os.fsync(handle)
        rate = written / (time.perf_counter() - started)
        return replace(place, write_bytes_per_s=rate, fsync_s=_time_fsync(handle))
    finally:
        os.close(handle)
        with suppress(OSError):
            Path(name).unlink()


def _time_fsync(handle: int) -> float:
    seconds = []
    for _ in range(_FSYNCS):
        started = time.perf_counter()
        os.write(handle, b"x")
        os.fsync(handle)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[_FSYNCS // 2]


def _filesystem(folder: Path) -> str:
    """The type of the file system, from the longest mount point above the folder."""
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, name, *_ = line.split()
        point = point.replace("\\040", " ")
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, name
    return kind
