"""A thread of the supervisor that reads the state of every local rank twenty times a second.

If a rank exits, the thread ends the others: they would wait for it. If a rank misses its deadline, every rank writes
its stacks, and the thread ends the attempt.
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

from paceline.errors import Cause
from paceline.launch.causes import RankExit, read_rank_exit
from paceline.metrics.screen import erase_live_line
from paceline.runs.machine import ProcessHandle
from paceline.runtime.pulse import Beat, HangClock, pulse_path, read_pulse
from paceline.runtime.watchdog import STACKS_SIGNAL, wait_for_stacks

_POLL_S = 0.05
_MEMORY_S = 0.5
_STOP_GRACE_S = 30.0  # after a rank that was asked to stop: the others save, too
_FAILURE_GRACE_S = 0.5  # after a failure: the others write their exit records
_STOPPED_NOTE_S = 5.0  # a shorter stop is not reported


@dataclass
class RankState:
    """What is known of one rank."""

    rank: int
    process: ProcessHandle | None = field(default=None, repr=False)  # None: it had exited before it was found
    beat: Beat | None = None
    exit: RankExit | None = None
    memory_mb: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    seen_at_s: float = 0.0
    is_alive: bool = True
    is_stopped: bool = False  # by SIGSTOP, SIGTSTP or a debugger
    was_ended_by_us: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether the rank was killed, crashed, or exited with an error."""
        if self.is_alive:
            return False
        if self.exit is not None:
            return self.exit.cause is not Cause.PREEMPTED
        return not self.is_done

    @property
    def is_done(self) -> bool:
        """Whether the rank has written that its work is done."""
        return self.beat is not None and self.beat.phase == "left"


class Watch:
    """Watches the ranks of one attempt on this node until `stop`."""

    def __init__(
        self,
        attempt_dir: Path,
        stacks_of: Callable[[int], Path],
        read_handles: Callable[[], dict[int, ProcessHandle | None]],
    ) -> None:
        self.ranks: dict[int, RankState] = {}
        self.hung: list[int] = []  # ranks that missed their deadline
        self.is_cut_short = False  # a stop has ended ranks that had not begun
        self._attempt_dir = attempt_dir
        self._stacks_of = stacks_of
        self._read_handles = read_handles
        self._over = threading.Event()
        self._is_asked_to_stop = False
        self._first_end_at: float | None = None
        self._memory_at = 0.0
        self._clock = HangClock()
        self._stopped: list[int] = []  # ranks that a signal has stopped
        self._stopped_at = 0.0
        self._is_stop_reported = False
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def stop_all(self, number: int) -> None:
        """Send a signal that asks for the end. Kill a rank without a pulse: it has no handler, and nothing to save."""
        self._is_asked_to_stop = True
        for state in self._states():
            state.beat = read_pulse(pulse_path(self._attempt_dir, state.rank)) or state.beat
            if state.beat is not None:
                _signal(state, number)
            else:
                self._kill_before_start(state)

    def _kill_before_start(self, state: RankState) -> None:
        self.is_cut_short = True
        _signal(state, signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for state in self._states():
            _signal(state, number)

    def _states(self) -> list[RankState]:
        """Of all ranks that were started so far."""
        return [self.ranks.setdefault(rank, RankState(rank, handle)) for rank, handle in self._read_handles().items()]

    def _run(self) -> None:
        while not self._over.wait(_POLL_S):
            self._look()
            self._end_the_rest()
            self._look_for_hangs()

    def _look(self) -> None:
        self._clock.look()
        now = self._clock.now
        wants_memory = now - self._memory_at > _MEMORY_S
        known = set(self.ranks)
        for state in self._states():
            if not state.is_alive or self.hung:
                continue
            if state.rank not in known and self._is_asked_to_stop:
                self._kill_before_start(state)
            state.seen_at_s = now
            # First whether it runs: what an exited rank has written is complete.
            state.is_alive = state.process is not None and state.process.is_running
            state.is_stopped = state.process is not None and state.process.is_stopped
            state.beat = read_pulse(pulse_path(self._attempt_dir, state.rank)) or state.beat
            state.exit = read_rank_exit(self._attempt_dir, state.rank)
            # Skip the first step: memory still grows while buffers are allocated.
            if wants_memory and state.is_alive and state.beat is not None and state.beat.step > 1:
                memory_mb = _resident_mb(state.beat.pid)
                if memory_mb > 0:  # an exiting process releases its memory before it counts as exited
                    state.memory_mb.append(memory_mb)
        if wants_memory:
            self._memory_at = now
        stopped = [state.rank for state in self.ranks.values() if state.is_alive and state.is_stopped]
        self._note_stopped(stopped)
        if self._first_end_at is not None:
            self._first_end_at += self._clock.excused_s(bool(stopped))

    def _note_stopped(self, stopped: list[int]) -> None:
        """A rank that a signal has stopped is not hung: wait for SIGCONT, and print a note."""
        now = self._clock.now
        if stopped and not self._stopped:
            self._stopped_at = now
        is_over = self._is_stop_reported and not stopped
        self._stopped = stopped or self._stopped
        if is_over or (stopped and not self._is_stop_reported and now - self._stopped_at > _STOPPED_NOTE_S):
            ranks = ("rank " if len(self._stopped) == 1 else "ranks ") + ", ".join(map(str, self._stopped))
            erase_live_line()
            what = "running again" if is_over else "stopped by a signal; waiting for SIGCONT"
            print(f"note: {ranks}: {what}", file=sys.stderr, flush=True)
            self._is_stop_reported = not is_over
        if not stopped:
            self._stopped = []

    def _end_the_rest(self) -> None:
        """When one rank has exited, the others cannot continue."""
        ended = [state for state in self.ranks.values() if not state.is_alive]
        if not ended or len(ended) == len(self.ranks):
            return
        now = self._clock.now
        if self._first_end_at is None:
            self._first_end_at = now
        is_lost = any(state.is_lost for state in ended)
        if now - self._first_end_at > (_FAILURE_GRACE_S if is_lost else _STOP_GRACE_S):
            self._signal_all(signal.SIGKILL)

    def _look_for_hangs(self) -> None:
        beats = {state.rank: state.beat for state in self.ranks.values() if state.is_alive and state.beat is not None}
        late = self._clock.find_late(beats, is_any_stopped=bool(self._stopped))
        if not late or self.hung or self._first_end_at is not None:
            return
        self.hung = late  # the states are final now: the signal for the stacks may wake up a sleeping rank
        self._collect_stacks()
        self._signal_all(signal.SIGKILL)

    def _collect_stacks(self) -> None:
        """Every rank writes its own, in a C handler: also a rank that holds Python's GIL."""
        self._signal_all(STACKS_SIGNAL)
        wait_for_stacks(map(self._stacks_of, self.ranks), self._over.wait)


def _signal(state: RankState, number: int) -> None:
    if state.process is not None and state.process.send(number):
        state.was_ended_by_us |= number == signal.SIGKILL


def _resident_mb(pid: int) -> float:
    try:
        pages = int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
