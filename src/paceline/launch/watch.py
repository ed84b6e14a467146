"""The supervisor's eyes: a thread that looks at every local rank twenty times a second.

It sees a rank die before torch's agent does, and ends the others at once: the agent would give them thirty
seconds. It sees a deadline pass, has every rank's stacks written, and ends the attempt without grace.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import EXIT_FINISHED, EXIT_PREEMPTED
from paceline.launch.words import LastWords, read_last_words
from paceline.runs.process_handle import ProcessHandle, find_forked
from paceline.world.pulse import Beat, pulse_path, read_pulse
from paceline.world.watchdog import STACKS_SIGNAL

_LOOK_S = 0.05
_MEMORY_S = 0.5
_POLITE_GRACE_S = 30.0  # others are leaving too, after a save
_FAILURE_GRACE_S = 0.5  # for others to say what they saw
_STACKS_S = 3.0


@dataclass
class RankSight:
    """What is known of one rank."""

    rank: int
    pid: int
    process: ProcessHandle | None = field(default=None, repr=False)  # None: it had ended before it was seen
    beat: Beat | None = None
    words: LastWords | None = None
    memory_mb: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    seen_at_s: float = 0.0
    is_alive: bool = True
    was_ended_by_us: bool = False

    @property
    def is_lost(self) -> bool:
        """Gone without a good end: killed, crashed, or left with an error."""
        if self.is_alive:
            return False
        if self.words is not None:
            return self.words.exit_code not in (EXIT_FINISHED, EXIT_PREEMPTED)
        return self.beat is None or self.beat.phase != "left"


class Watch:
    """Watches the ranks of one attempt on this node until it is told that the attempt is over."""

    def __init__(
        self, attempt_dir: Path, stacks_of: Callable[[int], Path], read_pids: Callable[[], dict[int, int]]
    ) -> None:
        self.ranks: dict[int, RankSight] = {}
        self.hung: list[int] = []  # ranks whose deadline passed
        self._attempt_dir = attempt_dir
        self._stacks_of = stacks_of
        self._read_pids = read_pids
        self._over = threading.Event()
        self._is_asked_to_stop = False
        self._first_end_at: float | None = None
        self._memory_at = 0.0
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def stop_all(self, number: int) -> None:
        """Send a signal that asks for the end. A rank without a pulse would not hear it, and has nothing to save."""
        self._is_asked_to_stop = True
        for rank, pid in self._read_pids().items():
            sight = self._sight_of(rank, pid)
            sight.beat = read_pulse(pulse_path(self._attempt_dir, rank)) or sight.beat
            _signal(sight, number if sight.beat is not None else signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        """Send a signal to every rank that is still there."""
        for rank, pid in self._read_pids().items():
            _signal(self._sight_of(rank, pid), number)

    def _sight_of(self, rank: int, pid: int) -> RankSight:
        if rank not in self.ranks:
            self.ranks[rank] = RankSight(rank, pid, find_forked(pid))
        return self.ranks[rank]

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._look()
            self._end_the_rest()
            self._look_for_hangs()

    def _look(self) -> None:
        now = time.monotonic()
        wants_memory = now - self._memory_at > _MEMORY_S
        for rank, pid in self._read_pids().items():
            is_new = rank not in self.ranks
            sight = self._sight_of(rank, pid)
            if not sight.is_alive or self.hung:
                continue
            if is_new and self._is_asked_to_stop:
                _signal(sight, signal.SIGKILL)
            sight.seen_at_s = now
            # Alive is asked first: what a dead rank left behind is then complete.
            sight.is_alive = sight.process is not None and sight.process.is_running
            sight.beat = read_pulse(pulse_path(self._attempt_dir, rank)) or sight.beat
            sight.words = read_last_words(self._attempt_dir, rank)
            # From the second step on: before, a rank's memory grows by right.
            if wants_memory and sight.is_alive and sight.beat is not None and sight.beat.step > 1:
                sight.memory_mb.append(_resident_mb(pid))
        if wants_memory:
            self._memory_at = now

    def _end_the_rest(self) -> None:
        """When one rank is gone, the others cannot go on."""
        ended = [sight for sight in self.ranks.values() if not sight.is_alive]
        if not ended or len(ended) == len(self.ranks):
            return
        now = time.monotonic()
        if self._first_end_at is None:
            self._first_end_at = now
        is_lost = any(sight.is_lost for sight in ended)
        if now - self._first_end_at > (_FAILURE_GRACE_S if is_lost else _POLITE_GRACE_S):
            self._signal_all(signal.SIGKILL)

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        late = [
            sight.rank
            for sight in self.ranks.values()
            if sight.is_alive and sight.beat is not None and now > sight.beat.deadline_s
        ]
        if not late or self.hung or self._first_end_at is not None:
            return
        self.hung = late  # what was seen now counts: the signal for the stacks may wake a sleeper up
        self._collect_stacks()
        self._signal_all(signal.SIGKILL)

    def _collect_stacks(self) -> None:
        """Every rank writes its own; a C handler does it, so a rank that holds Python's lock does too."""
        self._signal_all(STACKS_SIGNAL)
        deadline = time.monotonic() + _STACKS_S
        sizes: list[int] = []
        while time.monotonic() < deadline:
            before, sizes = sizes, [_size(self._stacks_of(rank)) for rank in self.ranks]
            if all(sizes) and sizes == before:
                return
            self._over.wait(_LOOK_S)


def _signal(sight: RankSight, number: int) -> None:
    if sight.process is not None and sight.process.send(number):
        sight.was_ended_by_us |= number == signal.SIGKILL


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _resident_mb(pid: int) -> float:
    try:
        pages = int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
