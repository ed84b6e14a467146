"""Deadlines for everything a rank does, learned from what it did before.

The rank marks each phase it enters in its pulse, together with the time by which it should be through. Under
our own supervisor that is all: the supervisor sees a deadline pass and asks every rank for its stacks, which
a C-level handler writes even while Python stands still. Under another launcher nobody reads the pulse, so a
C-level alarm in the rank itself writes the stacks and ends it.
"""

from __future__ import annotations

import faulthandler
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from paceline.world.pulse import Pulse

STACKS_SIGNAL = signal.SIGURG  # ignored by a process that has not yet registered for it
_START_S = 600.0  # data, compilation, the first collectives
_LEAST_STEP_S, _LEAST_OTHER_S = 30.0, 300.0
_FACTOR = 20
_REARM_S = 1.0
_BACKSTOP_S = 15.0  # under a supervisor the alarm only serves a rank whose supervisor is gone
_STEP_PHASES = ("data", "forward", "backward", "reduce", "update")


class Watchdog:
    """Marks this rank's phases and knows how long each may take."""

    def __init__(self, pulse: Pulse, *, timeout_s: float = 0.0, is_supervised: bool = False) -> None:
        self.pulse = pulse
        self.on_phase: Callable[[str, int], None] | None = None  # a fault waiting for its moment
        self._timeout_s = timeout_s
        self._slack_s = _BACKSTOP_S if is_supervised else 0.0
        self._step_times: deque[float] = deque(maxlen=50)
        self._step_limit_s = _START_S
        self._longest: dict[str, float] = {}
        self._last_step_at = 0.0
        self._since = time.monotonic()
        self._armed_until = 0.0
        self._stacks: TextIO | None = None
        self.pulse.beat("start", 0, _START_S)

    def open_stacks(self, path: Path) -> None:
        """From now on this rank's stacks can be had."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = path.open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)

    def enter(self, phase: str, step: int) -> None:
        """The rank begins a phase of this step."""
        now = time.monotonic()
        self._learn(phase, now)
        allowed_s = self._allowed(phase)
        self.pulse.beat(phase, step, allowed_s)
        if self._stacks is not None and abs(now + allowed_s - self._armed_until) > _REARM_S:
            # Arming starts a thread, so it is not done at every step.
            self._armed_until = now + allowed_s
            faulthandler.dump_traceback_later(allowed_s + _REARM_S + self._slack_s, file=self._stacks, exit=True)
        if self.on_phase is not None:
            self.on_phase(phase, step)

    @property
    def longest_step_s(self) -> float:
        """Of the last steps; 0 before the first."""
        return max(self._step_times, default=0.0)

    def close(self) -> None:
        """The rank's work is over; what is left is waiting for the others."""
        self.pulse.beat("left", self.pulse.step, _START_S)
        faulthandler.cancel_dump_traceback_later()

    def _learn(self, phase: str, now: float) -> None:
        last = self.pulse.phase
        if last not in _STEP_PHASES:
            self._longest[last] = max(self._longest.get(last, 0.0), now - self._since)
        elif last == "update":  # a whole step lies behind
            self._step_times.append(now - self._last_step_at)
            self._step_limit_s = self._timeout_s or max(_LEAST_STEP_S, _FACTOR * max(self._step_times))
        if phase == "data":
            self._last_step_at = now
        self._since = now

    def _allowed(self, phase: str) -> float:
        if not self._step_times:
            return _START_S
        if phase in _STEP_PHASES:
            return self._step_limit_s
        return self._timeout_s or max(_LEAST_OTHER_S, _FACTOR * self._longest.get(phase, 0.0))
