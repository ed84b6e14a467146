"""What ownership needs from a computer: its name, its processes, file locks, and the time.

Ownership uses the system only through this class. Tests pass another `Machine` to simulate two computers.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from paceline.runs.process_handle import (
    ProcessHandle,
    has_open_for_writing,
    has_several_threads,
    process_start,
    stat_fields,
)
from paceline.settings.small_files import read_small

_LARGEST_BYTES = 1_000_000


class Machine:
    """This computer."""

    @property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def boot_id(self) -> str | None:
        """Changes at every boot; None if the system does not provide it."""
        return read_text(Path("/proc/sys/kernel/random/boot_id")) or None

    @property
    def pid_namespace(self) -> str | None:
        """Containers on one machine may share its host name, but each has its own process numbers."""
        try:
            return str(Path("/proc/self/ns/pid").readlink())
        except OSError:
            return None

    @property
    def pid(self) -> int:
        return os.getpid()

    def exists(self, pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        # A zombie holds no files and writes nothing. If other threads still run, only the main thread has exited.
        return stat_fields(pid)[:1] != ["Z"] or has_several_threads(pid)

    def process_start(self, pid: int) -> str | None:
        """The start time in clock ticks since boot. With the process number it identifies a process."""
        return process_start(pid)

    def kill(self, pid: int, start: str) -> None:
        """SIGKILL, but never to a later process that was given the same number."""
        with suppress(ProcessLookupError, PermissionError):
            ProcessHandle(pid, start=start).send(signal.SIGKILL)

    def has_open(self, pid: int, path: Path) -> bool | None:
        """Whether a process has this file open for writing; None if the system does not provide it."""
        return has_open_for_writing(pid, path)

    def flock(self, descriptor: int, operation: int) -> None:
        fcntl.flock(descriptor, operation)

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def touch(self, path: Path) -> None:
        """Set a file's time to now, by the clock of the file server."""
        os.utime(path)

    def changed_ns(self, path: Path) -> int | None:
        """The modification time. Opening the file first makes a network file system ask its server."""
        try:
            with path.open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None

    def file_clock_ns(self, folder: Path) -> int:
        """The current time of the file system's clock. Clocks of two computers may differ."""
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
            file.write(b"1")
            file.flush()
            return os.fstat(file.fileno()).st_mtime_ns


THIS_MACHINE = Machine()


def read_text(path: Path) -> str:
    """The text of a small file; empty if it cannot be read."""
    try:
        return read_small(path, _LARGEST_BYTES).decode(errors="replace").strip()
    except (OSError, ValueError):
        return ""
