"""Checks of folders that training writes to, and of their disk's clock."""

from __future__ import annotations

from paceline.tools.doctor.findings import Finding, failed, passed, warned
from paceline.tools.doctor.gather.disk import Place

_MEGABYTE, _GIGABYTE = 10**6, 10**9
_ROOM_NEEDED, _ROOM_WANTED = 200 * _MEGABYTE, 2 * _GIGABYTE
_FILES_NEEDED = 1000
_SLOW_WRITE, _SLOW_FSYNC_S = 20 * _MEGABYTE, 1.0
_CLOCK_WARN_S, _CLOCK_FAIL_S = 2.0, 60.0
_EARLIEST = 1_735_689_600  # 1 January 2025: this program did not exist before


def check_place(name: str, facts: Place, *, flag: str) -> Finding:
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


def check_data(facts: Place) -> Finding:
    """A data folder that already holds data may be read-only."""
    finding = check_place("data folder", facts, flag="--data-dir")
    if finding.status == "fail" and not facts.is_empty:
        return passed("data folder", f"{facts.path}, read-only ({facts.error or 'the disk is full'})")
    return finding


def check_clock(facts: Place, now: float, drift_s: float) -> Finding:
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
