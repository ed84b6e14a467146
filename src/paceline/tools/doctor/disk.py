"""Folders of training: permissions, free space, speed, and the clock of their disk. Imports no torch."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.tools.doctor.findings import DoctorFinding, failed, passed, warned

# --- Facts ------------------------------------------------------------------------------------------------------------


_PROBE_BYTES = 32 * 2**20
_MOST_WRITE_S = 3.0
_FSYNCS = 3


@dataclass(frozen=True)
class FolderFacts:
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


def gather_place(path: Path, clock: Callable[[], float] = time.time, *, measures: bool = True) -> FolderFacts:
    """Writes a probe file into the folder, or its nearest existing parent, and removes it."""
    whole = path.expanduser().absolute()
    stands_in = next((folder for folder in (whole, *whole.parents) if folder.exists()), Path("/"))
    place = FolderFacts(path=str(path), stands_in=str(stands_in), exists=stands_in == whole)
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


def _write_probe(place: FolderFacts, size: int, clock: Callable[[], float]) -> FolderFacts:
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


# --- Checks -----------------------------------------------------------------------------------------------------------


_MEGABYTE, _GIGABYTE = 10**6, 10**9
_ROOM_NEEDED, _ROOM_WANTED = 200 * _MEGABYTE, 2 * _GIGABYTE
_FILES_NEEDED = 1000
_SLOW_WRITE, _SLOW_FSYNC_S = 20 * _MEGABYTE, 1.0
_CLOCK_WARN_S, _CLOCK_FAIL_S = 2.0, 60.0
_EARLIEST = 1_735_689_600  # 1 January 2025: this program did not exist before


def check_place(name: str, facts: FolderFacts, *, flag: str) -> DoctorFinding:
    """A folder that training writes to."""
    where = facts.path if facts.exists else f"{facts.path} (to be made in {facts.stands_in})"
    elsewhere = f"use another {flag}"
    if facts.free_bytes < _ROOM_NEEDED and (not facts.error or "space" in facts.error):
        what = f"{where}: the disk is full, {facts.free_bytes / _MEGABYTE:.0f} MB are free"
        return failed(name, what, f"free space (du -xsh {facts.stands_in}/* shows what uses it), or {elsewhere}")
    if facts.error:
        remedy = f"ls -ld {facts.stands_in} shows its owner; chown or chmod it, or {elsewhere}"
        return failed(name, f"{where} cannot be written: {facts.error}", remedy)
    if facts.free_files is not None and facts.free_files < _FILES_NEEDED:
        what = f"{where}: the disk has inodes for only {facts.free_files} more files"
        return failed(name, what, f"remove files (df -i shows how many there are), or {elsewhere}")
    speed = ""
    if facts.write_bytes_per_s is not None and facts.fsync_s is not None:
        speed = f", writes {facts.write_bytes_per_s / _MEGABYTE:,.0f} MB/s, fsync {1000 * facts.fsync_s:.1f} ms"
    what = f"{where}: {facts.free_bytes / _GIGABYTE:.1f} GB free{speed} ({facts.filesystem or 'unknown'})"
    if facts.free_bytes < _ROOM_WANTED:
        return warned(name, what, f"space for only a few checkpoints; free space, or {elsewhere}")
    is_slow = facts.write_bytes_per_s is not None and facts.write_bytes_per_s < _SLOW_WRITE
    if is_slow or (facts.fsync_s or 0.0) > _SLOW_FSYNC_S:
        return warned(name, f"{what}: slow", f"checkpoints will take long; {elsewhere} on a local or parallel disk")
    return passed(name, what)


def check_data(facts: FolderFacts) -> DoctorFinding:
    """A data folder that already holds data may be read-only."""
    finding = check_place("data folder", facts, flag="--data-dir")
    if finding.status == "fail" and not facts.is_empty:
        return passed("data folder", f"{facts.path}, read-only ({facts.error or 'the disk is full'})")
    return finding


def check_clock(facts: FolderFacts, now: float, drift_s: float) -> DoctorFinding:
    """A single node can compare its clock with its disk's clock, the monotonic clock and a fixed date."""
    remedy = "set the clock: timedatectl set-ntp true, or chronyc makestep; or ask the administrator"
    if now < _EARLIEST:
        return failed("clock", "the clock is years behind", remedy)
    ahead = facts.clock_ahead_s or 0.0
    if abs(ahead) > _CLOCK_WARN_S:
        which = "ahead of" if ahead < 0 else "behind"
        what = f"this machine's clock is {abs(ahead):.1f} s {which} the clock of the disk under {facts.stands_in}"
        report = failed if abs(ahead) > _CLOCK_FAIL_S else warned
        return report("clock", what, remedy, ahead_s=-ahead)
    if abs(drift_s) > _CLOCK_WARN_S:
        return failed("clock", f"the clock jumped by {drift_s:.1f} s during the check", remedy)
    if facts.clock_ahead_s is None:
        return passed("clock", "runs evenly; the clock of the run folder's disk is unknown")
    return passed("clock", f"agrees with the disk's to {abs(ahead):.2f} s, and runs evenly")
