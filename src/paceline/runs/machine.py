"""What ownership needs from a computer: its name, its processes, file locks, and the time.

Ownership uses the system only through this class. Tests pass another `Machine` to simulate two computers.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.settings.small_files import read_small

_POLL_S = 0.05
_THREADS = 17  # positions in /proc/PID/stat, counted from the state
_START_TIME = 19
_LARGEST_BYTES = 1_000_000


# A handle on a process that cannot be confused with a later process of the same number.
#
# The kernel gives a process ID to a new process as soon as the old one is reaped. A signal to a bare ID can therefore
# hit a process of another program. On Linux the handle is a pidfd, which stays with its process. If the system has
# none, the start time of the process is compared before each use.


class ProcessHandle:
    """One process, from now until it is reaped."""

    def __init__(self, pid: int, *, start: str | None = None, parent: int | None = None) -> None:
        """Raises ProcessLookupError if there is no such process, or if its start time or parent differ from these."""
        self.pid = pid
        self._descriptor = _open_pidfd(pid)
        if self._descriptor is not None:
            # Closed with the last reference. An explicit close could race with a signal sent by another thread.
            weakref.finalize(self, os.close, self._descriptor)
        fields = stat_fields(pid)
        self.start = fields[_START_TIME] if len(fields) > _START_TIME else None
        is_other = (start is not None and self.start is not None and self.start != start) or (
            parent is not None and len(fields) > 1 and fields[1] != str(parent)
        )
        # The fields are those of this process only if it has not been reaped while they were read.
        if is_other or not self._is_same_process():
            raise ProcessLookupError(f"process {pid} has ended")

    def send(self, number: int) -> bool:
        """Send a signal; False if the process has ended. Raises PermissionError for a process of another user."""
        try:
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, number)
            elif self._is_same_process():
                os.kill(self.pid, number)
            else:
                return False
        except ProcessLookupError:
            return False
        return True

    def kill_group(self) -> None:
        """SIGKILL to the process group that this process leads. Its number is not reused while the leader runs."""
        if self.is_running:
            _signal_group(self.pid, signal.SIGKILL)

    @property
    def state(self) -> str | None:
        """The state letter of /proc/PID/stat, such as R, S, T or Z; None if it is reaped, or without /proc."""
        fields = stat_fields(self.pid)
        return fields[0] if fields and self._is_same_process() else None

    @property
    def is_running(self) -> bool:
        """Whether the process has not exited. A zombie has exited but was not reaped."""
        if self._descriptor is not None:
            return not select.select([self._descriptor], [], [], 0)[0]
        return self._is_same_process() and (self.state != "Z" or has_several_threads(self.pid))

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, SIGTSTP) or a debugger has stopped the process."""
        return is_stopped(self.pid) and self._is_same_process()

    def wait(self) -> None:
        """Return when the process has exited."""
        if self._descriptor is not None:
            select.select([self._descriptor], [], [])
            return
        while self.is_running:
            time.sleep(_POLL_S)

    def _is_same_process(self) -> bool:
        if self._descriptor is not None:
            try:
                signal.pidfd_send_signal(self._descriptor, 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                pass
            return True
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        return process_start(self.pid) == self.start


def process_start(pid: int) -> str | None:
    """The start time in clock ticks since boot; None if the system does not provide it."""
    fields = stat_fields(pid)
    return fields[_START_TIME] if len(fields) > _START_TIME else None


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on. The name before it may contain any character."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return text.rpartition(b")")[2].decode(errors="replace").split()


def has_open_for_writing(pid: int, path: Path) -> bool | None:
    """Whether a process has this file open for writing; None if the system does not provide it."""
    try:
        wanted = path.lstat()
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:  # the file or the process does not exist any more
        return False if Path("/proc/self/fd").is_dir() else None
    except OSError:
        return None
    if not descriptors and has_several_threads(pid):
        return None  # its main thread has exited; the others may still write
    return any(_is_open_as(descriptor, path.name, wanted) for descriptor in descriptors)


def _is_open_as(descriptor: Path, name: str, wanted: os.stat_result) -> bool:
    try:
        # Compare names first. A stat of a file on another file system could hang.
        if name not in descriptor.readlink().name:
            return False
        if not os.path.samestat(descriptor.stat(), wanted):
            return False
        lines = (descriptor.parents[1] / "fdinfo" / descriptor.name).read_text().splitlines()
    except OSError:  # closed meanwhile
        return False
    flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), os.O_RDONLY)
    return flags & os.O_ACCMODE != os.O_RDONLY


def has_several_threads(pid: int) -> bool:
    fields = stat_fields(pid)
    return len(fields) > _THREADS and int(fields[_THREADS]) > 1


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process that has this number now."""
    return stat_fields(pid)[:1] in (["T"], ["t"])


def identity_of(pid: int) -> str:
    """`PID` or `PID@START`."""
    start = process_start(pid)
    return str(pid) if start is None else f"{pid}@{start}"


def identity_of_this_process() -> str:
    """Passed to a child in its environment."""
    return identity_of(os.getpid())


def age_s(identity: str) -> float | None:
    """How long ago the process with this identity was started; None if this system does not say it."""
    _, _, start = identity.partition("@")
    if not start.isdecimal() or not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(start) / os.sysconf("SC_CLK_TCK"))


def find_process(identity: str) -> ProcessHandle | None:
    """The process with this identity; None if it has ended."""
    pid, _, start = identity.partition("@")
    try:
        return ProcessHandle(int(pid), start=start or None)
    except ProcessLookupError:
        return None


def find_forked(pid: int) -> ProcessHandle | None:
    """A child of the fork server of this process, which reaps it as soon as it exits; None if it has ended."""
    from multiprocessing import forkserver

    server = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    try:
        return ProcessHandle(pid, parent=server)
    except ProcessLookupError:
        return None


def end_group(leader: subprocess.Popen[Any], *, ask: int = signal.SIGTERM, grace_s: float) -> None:
    """End a child that leads its own process group, and all processes that are left in its group.

    The child is reaped last. Until then no other process can get its number, which is also the number of the group.
    """
    if leader.returncode is None:
        if exit_code_of(leader) is None:
            _signal_group(leader.pid, ask)
            deadline = time.monotonic() + grace_s
            while exit_code_of(leader) is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        _signal_group(leader.pid, signal.SIGKILL)
    leader.wait()


def wait_for_group(leader: int, limit_s: float) -> None:
    """Wait until a process group whose leader has ended is empty, or until the limit. Sends no signal."""
    deadline = time.monotonic() + limit_s
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            time.sleep(_POLL_S)


def exit_code_of(child: subprocess.Popen[Any]) -> int | None:
    """Like `child.poll()`, but the child stays unreaped."""
    if child.returncode is not None:
        return int(child.returncode)
    end = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _signal_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _open_pidfd(pid: int) -> int | None:
    if pid <= 0:
        raise ProcessLookupError(f"no process has the number {pid}")
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:  # a kernel or a sandbox without this call
        return None


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
