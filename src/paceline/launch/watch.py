"""The supervisor's eyes: a thread that looks at every local rank twenty times a second.

It sees a rank die before torch's agent does, and ends the others at once: the agent would give them thirty
seconds. It sees a deadline pass, has every rank's stacks written, and ends the attempt without grace.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import EXIT_FINISHED, EXIT_PREEMPTED
from paceline.launch.rank_exit import RankExit, read_last_words
from paceline.metrics.screen import erase_live_line
from paceline.runs.process_handle import ProcessHandle, find_forked
from paceline.runtime.hang_guard import STACKS_SIGNAL, wait_for_stacks
from paceline.runtime.pulse import Beat, pulse_path, read_pulse
from paceline.runtime.running_clock import HangClock

_LOOK_S = 0.05
_MEMORY_S = 0.5
_POLITE_GRACE_S = 30.0  # others are leaving too, after a save
_FAILURE_GRACE_S = 0.5  # for others to say what they saw
_STOPPED_TOLD_S = 5.0


@dataclass
class RankSight:
    """What is known of one rank."""

    rank: int
    pid: int
    process: ProcessHandle | None = field(default=None, repr=False)  # None: it had ended before it was seen
    beat: Beat | None = None
    words: RankExit | None = None
    memory_mb: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    seen_at_s: float = 0.0
    is_alive: bool = True
    is_stopped: bool = False  # by SIGSTOP, SIGTSTP or a debugger
    was_ended_by_us: bool = False

    @property
    def is_lost(self) -> bool:
        """Gone without a good end: killed, crashed, or left with an error."""
        if self.is_alive:
            return False
        if self.words is not None:
            return self.words.exit_code not in (EXIT_FINISHED, EXIT_PREEMPTED)
        return not self.has_left

    @property
    def has_left(self) -> bool:
        """The rank has said that its work is over."""
        return self.beat is not None and self.beat.phase == "left"


class Watch:
    """Watches the ranks of one attempt on this node until it is told that the attempt is over."""

    def __init__(
        self, attempt_dir: Path, stacks_of: Callable[[int], Path], read_pids: Callable[[], dict[int, int]]
    ) -> None:
        self.ranks: dict[int, RankSight] = {}
        self.hung: list[int] = []  # ranks whose deadline passed
        self.is_cut_short = False  # a stop has ended ranks that had not begun
        self._attempt_dir = attempt_dir
        self._stacks_of = stacks_of
        self._read_pids = read_pids
        self._over = threading.Event()
        self._is_asked_to_stop = False
        self._first_end_at: float | None = None
        self._memory_at = 0.0
        self._clock = HangClock()
        self._stopped: list[int] = []  # ranks that a signal has stopped
        self._stopped_at = 0.0
        self._is_stop_told = False
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
            if sight.beat is not None:
                _signal(sight, number)
            else:
                self._end_before_it_begins(sight)

    def _end_before_it_begins(self, sight: RankSight) -> None:
        self.is_cut_short = True
        _signal(sight, signal.SIGKILL)

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
        self._clock.look()
        now = self._clock.now
        wants_memory = now - self._memory_at > _MEMORY_S
        for rank, pid in self._read_pids().items():
            is_new = rank not in self.ranks
            sight = self._sight_of(rank, pid)
            if not sight.is_alive or self.hung:
                continue
            if is_new and self._is_asked_to_stop:
                self._end_before_it_begins(sight)
            sight.seen_at_s = now
            # Alive is asked first: what a dead rank left behind is then complete.
            sight.is_alive = sight.process is not None and sight.process.is_running
            sight.is_stopped = sight.process is not None and sight.process.is_stopped
            sight.beat = read_pulse(pulse_path(self._attempt_dir, rank)) or sight.beat
            sight.words = read_last_words(self._attempt_dir, rank)
            # From the second step on: before, a rank's memory grows by right.
            if wants_memory and sight.is_alive and sight.beat is not None and sight.beat.step > 1:
                memory_mb = _resident_mb(pid)
                if memory_mb > 0:  # a process that exits has released its memory a moment before it counts as ended
                    sight.memory_mb.append(memory_mb)
        if wants_memory:
            self._memory_at = now
        stopped = [sight.rank for sight in self.ranks.values() if sight.is_alive and sight.is_stopped]
        self._note_stopped(stopped)
        if self._first_end_at is not None:
            self._first_end_at += self._clock.excused_s(bool(stopped))

    def _note_stopped(self, stopped: list[int]) -> None:
        """Stopped by a signal is not hung: wait for SIGCONT, and say so."""
        now = self._clock.now
        if stopped and not self._stopped:
            self._stopped_at = now
        is_over = self._is_stop_told and not stopped
        self._stopped = stopped or self._stopped
        if is_over or (stopped and not self._is_stop_told and now - self._stopped_at > _STOPPED_TOLD_S):
            ranks = ("rank " if len(self._stopped) == 1 else "ranks ") + ", ".join(map(str, self._stopped))
            erase_live_line()
            what = "running again" if is_over else "stopped by a signal; waiting for SIGCONT"
            print(f"note: {ranks}: {what}", file=sys.stderr, flush=True)
            self._is_stop_told = not is_over
        if not stopped:
            self._stopped = []

    def _end_the_rest(self) -> None:
        """When one rank is gone, the others cannot go on."""
        ended = [sight for sight in self.ranks.values() if not sight.is_alive]
        if not ended or len(ended) == len(self.ranks):
            return
        now = self._clock.now
        if self._first_end_at is None:
            self._first_end_at = now
        is_lost = any(sight.is_lost for sight in ended)
        if now - self._first_end_at > (_FAILURE_GRACE_S if is_lost else _POLITE_GRACE_S):
            self._signal_all(signal.SIGKILL)

    def _look_for_hangs(self) -> None:
        beats = {sight.rank: sight.beat for sight in self.ranks.values() if sight.is_alive and sight.beat is not None}
        late = self._clock.find_late(beats, is_any_stopped=bool(self._stopped))
        if not late or self.hung or self._first_end_at is not None:
            return
        self.hung = late  # what was seen now counts: the signal for the stacks may wake a sleeper up
        self._collect_stacks()
        self._signal_all(signal.SIGKILL)

    def _collect_stacks(self) -> None:
        """Every rank writes its own; a C handler does it, so a rank that holds Python's lock does too."""
        self._signal_all(STACKS_SIGNAL)
        wait_for_stacks(map(self._stacks_of, self.ranks), self._over.wait)


def _signal(sight: RankSight, number: int) -> None:
    if sight.process is not None and sight.process.send(number):
        sight.was_ended_by_us |= number == signal.SIGKILL


def _resident_mb(pid: int) -> float:
    try:
        pages = int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
