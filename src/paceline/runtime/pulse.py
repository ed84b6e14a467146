"""A rank's heartbeat (pulse) in shared memory: its step, its phase, and the deadline of the phase.

A rank writes its record at every change of phase, which costs a microsecond. The supervisor of a node reads the
records of all its ranks. The clock is CLOCK_MONOTONIC: it is the same for the whole machine, and changes of the date
do not affect it.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ATTEMPT_DIR = "PACELINE_ATTEMPT_DIR"  # the folder in which the ranks of an attempt write their pulse and exit records
PEERS_FAILED = "peers-failed"  # a file there: ranks of another node have failed and will not register

# In the order of a step: of two ranks in the same step, the one with the lower phase is behind.
PHASES = ("start", "data", "forward", "backward", "reduce", "update", "save", "evaluate", "finish", "left")
_NUMBERS = {name: number for number, name in enumerate(PHASES)}
# number of the beat, pid, step, phase, largest microbatch that fitted, since, deadline, number again
_RECORD = struct.Struct("=qqqqqddq")
_TRIES = 5
OPEN_FILES = Path("/proc/self/fd")
GAP_S = 2.0  # a longer gap between two readings is a suspension: no scheduler delays a ready thread this long


@dataclass(frozen=True)
class Beat:
    """One reading of a pulse."""

    pid: int
    step: int
    phase: str
    fitted: int  # samples of the largest microbatch that completed a backward pass
    since_s: float  # monotonic time at which the phase began
    deadline_s: float  # monotonic time by which it should be over

    @property
    def place(self) -> tuple[int, int]:
        """Step and phase, for comparison: a rank that is further has the larger value."""
        return self.step, _NUMBERS[self.phase]


class Pulse:
    """This rank's record. Without a path it is kept in private memory and is not read."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is None:
            self._memory = mmap.mmap(-1, _RECORD.size)
        else:
            with path.open("w+b") as file:
                file.truncate(_RECORD.size)
                self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self.step, self.phase, self.fitted = 0, "start", 0
        self._beats = 0
        self._pid = os.getpid()

    def beat(self, phase: str, step: int, allowed_s: float) -> None:
        """Record that the rank enters this phase and should leave it within `allowed_s` seconds."""
        self.phase, self.step = phase, step
        now = time.monotonic()
        self._beats = number = self._beats + 1
        # Copy the whole record at once. The same number at both ends shows a reader that the record is consistent.
        self._memory[:] = _RECORD.pack(
            number, self._pid, step, _NUMBERS[phase], self.fitted, now, now + allowed_s, number
        )


def pulse_path(attempt_dir: Path, rank: int) -> Path:
    return attempt_dir / f"rank-{rank}.pulse"


@contextmanager
def open_pulse(rank: int, *, is_supervised: bool, allowed_s: float) -> Iterator[Pulse]:
    """The pulse of a rank of `bench` or `doctor`. Under our launcher, which reads it, the rank is done at the end."""
    pulse = Pulse(pulse_path(Path(os.environ[ATTEMPT_DIR]), rank) if is_supervised else None)
    pulse.beat("start", 0, allowed_s)
    yield pulse
    pulse.beat("left", 0, allowed_s)


def private_pulse_path() -> Path:
    """For a rank without a supervisor, shared with its hang guard. On Linux a file without a name, never left over."""
    if hasattr(os, "memfd_create"):
        return OPEN_FILES / str(os.memfd_create("paceline-pulse"))
    descriptor, path = tempfile.mkstemp(prefix="paceline-", suffix=".pulse")
    os.close(descriptor)
    return Path(path)


def read_pulse(path: Path) -> Beat | None:
    """None before the rank's first beat, or if the record changes faster than it can be read."""
    for _ in range(_TRIES):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) < _RECORD.size:
            return None
        first, pid, step, phase, fitted, since, deadline, last = _RECORD.unpack(data)
        if first == last != 0:
            return Beat(pid, step, PHASES[phase], fitted, since, deadline)
    return None


# Clocks that do not count the time in which this process was suspended.
#
# A suspended job (Ctrl-Z, Slurm's suspend, a paused container, a closed laptop) continues after minutes or hours. The
# monotonic clock may count this time. A loop that reads the clock several times a second sees a suspension as a long
# gap between two readings. A deadline that counts the gap would report a failure where nothing failed.


class RunningClock:
    """Seconds in which this process ran. Must be read more often than `gap_s`."""

    def __init__(self, gap_s: float = GAP_S) -> None:
        self._gap_s = gap_s
        self._seconds = 0.0
        self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        now = time.monotonic()
        passed, self._last = now - self._last, now
        if passed <= self._gap_s:
            self._seconds += passed
        return self._seconds


class HangClock:
    """Finds ranks that missed their deadline. Does not count time in which they or this process were stopped."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.passed_s = 0.0  # between the last two readings
        self._excused: dict[int, tuple[float, float]] = {}  # by rank: the beginning of its phase, seconds not counted

    def look(self) -> None:
        """Read the clock. All decisions until the next call use this reading: a suspension may begin at any line."""
        now = time.monotonic()
        self.passed_s, self.now = now - self.now, now

    def excused_s(self, is_any_stopped: bool) -> float:
        """How much of the time between the last two readings does not count."""
        return self.passed_s if is_any_stopped or self.passed_s > GAP_S else 0.0

    def find_late(self, beats: dict[int, Beat], *, is_any_stopped: bool) -> list[int]:
        """Ranks that are in their phase for too long. If one rank is stopped, the others may be waiting for it."""
        excused_s = self.excused_s(is_any_stopped)
        late = []
        for rank, beat in beats.items():
            since_s, before_s = self._excused.get(rank, (beat.since_s, 0.0))
            if since_s != beat.since_s:
                before_s = 0.0  # a new phase
            total_s = before_s + min(excused_s, max(0.0, self.now - beat.since_s))
            self._excused[rank] = beat.since_s, total_s
            if self.now > beat.deadline_s + total_s:
                late.append(rank)
        return late
