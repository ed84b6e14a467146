"""Watch, stop and kill processes from outside, like users, schedulers and the kernel."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.cli import environment

GONE_DEADLINE_S = 20


def processes_in(folder: Path) -> list[int]:
    """Running processes with this working folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder.resolve():
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or a zombie
            continue
    return found


def kill_all_in(folder: Path) -> int:
    """Kill all processes at once, as in a machine failure. Returns their number."""
    victims = processes_in(folder)
    deadline = time.monotonic() + GONE_DEADLINE_S
    while living := processes_in(folder):
        assert time.monotonic() < deadline, f"still alive: {living}"
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    return len(victims)


def seconds_until_empty(folder: Path, limit_s: float) -> float:
    """Seconds until no process uses this working folder any more."""
    started = time.monotonic()
    while processes_in(folder):
        assert time.monotonic() - started < limit_s, f"still alive after {limit_s} s: {processes_in(folder)}"
        time.sleep(0.01)
    return time.monotonic() - started


def parent_of(pid: int) -> int:
    try:
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def rank_pids(folder: Path, supervisor: int) -> list[int]:
    """The ranks: grandchildren of the supervisor, because the fork server starts them."""
    everyone = {pid: parent_of(pid) for pid in processes_in(folder)}
    return sorted(pid for pid, parent in everyone.items() if everyone.get(parent) == supervisor)


class Started:
    """A running command whose output is read line by line."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def err(self) -> str:
        return (self.folder / "stderr.txt").read_text()

    def ranks(self) -> list[int]:
        return rank_pids(self.folder, self.process.pid)

    def wait_for(self, start: str, timeout_s: float = 60) -> str:
        """The next line that starts with this text."""
        deadline = time.monotonic() + timeout_s
        while True:
            line = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            assert line is not None, f"no line starts with {start!r}:\n{''.join(self.lines)}\n{self.err}"
            if line.startswith(start):
                return line

    def wait(self, timeout_s: float = 60) -> int:
        return self.process.wait(timeout_s)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)


@contextmanager
def started(
    *arguments: str, cwd: Path, launcher: Sequence[str] = ("-m", "paceline"), **extra: str
) -> Iterator[Started]:
    """Run `paceline ARGUMENTS` in a new session. All its processes are ended with the block."""
    surroundings = environment(PYTHONUNBUFFERED="1", **extra)
    with (
        (cwd / "stderr.txt").open("w") as errors,
        subprocess.Popen(
            [sys.executable, *launcher, *arguments],
            cwd=cwd,
            env=surroundings,
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield Started(process, cwd)
        finally:
            kill_all_in(cwd)
    assert processes_in(cwd) == []
