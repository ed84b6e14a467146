"""A rank's pulse: where it stands and until when it may stand there, in shared memory.

A rank writes its own record at every change of phase, which costs a microsecond; whoever watches the ranks
of a node (the supervisor) reads all of them without asking. The clock is CLOCK_MONOTONIC, one for the whole
machine and untouched by changes of the date.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ATTEMPT_DIR = "PACELINE_ATTEMPT_DIR"  # where the ranks of an attempt leave their pulse and their last words
PEERS_FAILED = "peers-failed"  # a file there: ranks of another node have failed, and will not come to the roll call

# In the order in which a step passes through them: of two ranks in one step, the lower is behind.
PHASES = ("start", "data", "forward", "backward", "reduce", "update", "save", "evaluate", "finish", "left")
_NUMBERS = {name: number for number, name in enumerate(PHASES)}
# number of the beat, pid, step, phase, largest microbatch that fitted, since, deadline, number again
_RECORD = struct.Struct("=qqqqqddq")
_TRIES = 5
OPEN_FILES = Path("/proc/self/fd")


@dataclass(frozen=True)
class Beat:
    """One reading of a pulse."""

    pid: int
    step: int
    phase: str
    fitted: int  # samples of the largest microbatch that went through backward
    since_s: float  # monotonic time at which the phase began
    deadline_s: float  # monotonic time by which it should be over

    @property
    def place(self) -> tuple[int, int]:
        """Further on is larger."""
        return self.step, _NUMBERS[self.phase]


class Pulse:
    """This rank's record. Without a path nobody reads it, and everything still works."""

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
        """The rank is in this phase now and should have left it in `allowed_s` seconds."""
        self.phase, self.step = phase, step
        now = time.monotonic()
        self._beats = number = self._beats + 1
        # One copy of the whole record. The same number at both ends tells a reader that it caught all of one beat.
        self._memory[:] = _RECORD.pack(
            number, self._pid, step, _NUMBERS[phase], self.fitted, now, now + allowed_s, number
        )


def pulse_path(attempt_dir: Path, rank: int) -> Path:
    return attempt_dir / f"rank-{rank}.pulse"


def private_pulse_path() -> Path:
    """For a rank without a supervisor, shared with its hang guard. On Linux a file without a name: nothing is left."""
    if hasattr(os, "memfd_create"):
        return OPEN_FILES / str(os.memfd_create("paceline-pulse"))
    descriptor, path = tempfile.mkstemp(prefix="paceline-", suffix=".pulse")
    os.close(descriptor)
    return Path(path)


def read_pulse(path: Path) -> Beat | None:
    """None before the rank's first beat, or when it beats too fast to be read just now."""
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
