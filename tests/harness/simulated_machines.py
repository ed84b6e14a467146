"""Simulated computers and processes in one test process, with the interface of `runs/machine.py`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from paceline.runs.machine import Machine

_LONG_AGO_S = 10_000.0  # older than any heartbeat


class Computers:
    """All processes of all hosts, the locks they hold, and one clock that advances only by waiting."""

    def __init__(self) -> None:
        self.clock_s = _LONG_AGO_S
        self.living: set[tuple[str, int]] = set()
        self.locks: dict[int, tuple[str, int]] = {}  # by inode, as on a file system with locks across hosts
        self.changed_s: dict[Path, float] = {}
        self.while_waiting: Callable[[], None] = lambda: None
        self._next_pid = 100_000

    def start_process(self, host: str) -> SimulatedMachine:
        self._next_pid += 1
        self.living.add((host, self._next_pid))
        return SimulatedMachine(self, host, self._next_pid)

    def end_process(self, machine: SimulatedMachine) -> None:
        """End a process and release its locks."""
        self.living.discard((machine.host, machine.pid))
        self.locks = {inode: holder for inode, holder in self.locks.items() if holder in self.living}


class SimulatedMachine(Machine):
    """A host, from the view of one of its processes."""

    def __init__(self, computers: Computers, host: str, pid: int) -> None:
        self._computers = computers
        self._host = host
        self._pid = pid

    host = property(lambda self: self._host)  # type: ignore[assignment]
    boot_id = property(lambda self: f"boot of {self._host}")  # type: ignore[assignment]
    pid_namespace = property(lambda self: None)  # type: ignore[assignment]
    pid = property(lambda self: self._pid)  # type: ignore[assignment]

    @property
    def is_alive(self) -> bool:
        return (self._host, self._pid) in self._computers.living

    def exists(self, pid: int) -> bool:
        return (self._host, pid) in self._computers.living

    def process_start(self, pid: int) -> str | None:
        return f"start of {pid}" if self.exists(pid) else None

    def kill(self, pid: int, start: str) -> None:
        self._computers.end_process(SimulatedMachine(self._computers, self._host, pid))

    def has_open(self, pid: int, path: Path) -> bool | None:
        return self.exists(pid)

    def flock(self, descriptor: int, operation: int) -> None:
        inode = os.fstat(descriptor).st_ino
        holder = self._computers.locks.get(inode)
        if holder is not None and holder in self._computers.living and holder != (self._host, self._pid):
            raise BlockingIOError(errno.EAGAIN, "locked")
        self._computers.locks[inode] = (self._host, self._pid)

    def now_s(self) -> float:
        return self._computers.clock_s

    def sleep(self, seconds: float) -> None:
        self._computers.clock_s += max(seconds, 0.5)
        self._computers.while_waiting()

    def touch(self, path: Path) -> None:
        self._computers.changed_s[path] = self._computers.clock_s

    def changed_ns(self, path: Path) -> int | None:
        return int(1e9 * self._computers.changed_s.get(path, 0.0)) if path.exists() else None

    def file_clock_ns(self, folder: Path) -> int:
        return int(1e9 * self._computers.clock_s)
