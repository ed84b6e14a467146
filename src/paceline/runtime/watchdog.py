"""Deadlines for the phases of a rank, computed from earlier durations.

The rank writes each phase and its deadline to its pulse. Under our own supervisor it does nothing else: the supervisor
sees a missed deadline and signals every rank to write its stacks. A C-level handler writes them even if Python is
blocked. Under another launcher each rank starts a small process that does the same (`hang_guard.py`).
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from paceline.runtime.hang_guard import STACKS_SIGNAL, start_hang_guard
from paceline.runtime.pulse import Pulse
from paceline.settings.small_files import make_plain_folder, open_plain

_START_S = 600.0  # data, compilation, the first collectives
_LEAST_STEP_S, _LEAST_OTHER_S = 30.0, 300.0
_FACTOR = 20
_STEP_PHASES = ("data", "forward", "backward", "reduce", "update")


class Watchdog:
    """Records this rank's phases and computes how long each may take."""

    def __init__(self, pulse: Pulse, *, timeout_s: float = 0.0, is_supervised: bool = False) -> None:
        self.pulse = pulse
        self._timeout_s = timeout_s
        self._is_supervised = is_supervised
        self._allowed_s = _START_S
        self._step_times: deque[float] = deque(maxlen=50)
        self._step_limit_s = _START_S
        self._longest: dict[str, float] = {}
        self._last_step_at = 0.0
        self._is_step_whole = True  # False if the step was suspended
        self._since = time.monotonic()
        self._stacks: TextIO | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self.pulse.beat("start", 0, _START_S)

    def open_stacks(self, path: Path) -> None:
        """Allow others to request this rank's stacks from now on."""
        make_plain_folder(path.parent)
        self._stacks = open(open_plain(path, os.O_WRONLY | os.O_TRUNC), "w")  # noqa: PTH123, SIM115 - a descriptor
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        if not self._is_supervised and self.pulse.path is not None:
            self._guard = start_hang_guard(self.pulse.path, path)

    def enter(self, phase: str, step: int) -> None:
        """The rank begins a phase of this step."""
        now = time.monotonic()
        self._learn(phase, now)
        self._allowed_s = self._allowed(phase)
        self.pulse.beat(phase, step, self._allowed_s)

    @property
    def longest_step_s(self) -> float:
        """Of the last steps; 0 before the first."""
        return max(self._step_times, default=0.0)

    def close(self) -> None:
        """Call when the rank's work is done. It then only waits for the others."""
        self.pulse.beat("left", self.pulse.step, _START_S)
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None
            if self.pulse.path is not None:
                with suppress(OSError):  # a file without a name
                    self.pulse.path.unlink()

    def _learn(self, phase: str, now: float) -> None:
        """Update the durations. A phase that took longer than allowed was suspended, and is not counted."""
        last = self.pulse.phase
        is_suspended = now - self._since > self._allowed_s
        self._is_step_whole &= not is_suspended
        if last not in _STEP_PHASES:
            if not is_suspended:
                self._longest[last] = max(self._longest.get(last, 0.0), now - self._since)
        elif last == "update" and self._is_step_whole:  # a complete step is done
            self._step_times.append(now - self._last_step_at)
            self._step_limit_s = self._timeout_s or max(_LEAST_STEP_S, _FACTOR * max(self._step_times))
        if phase == "data":
            self._last_step_at = now
            self._is_step_whole = True
        self._since = now

    def _allowed(self, phase: str) -> float:
        if not self._step_times:
            return _START_S
        if phase in _STEP_PHASES:
            return self._step_limit_s
        return self._timeout_s or max(_LEAST_OTHER_S, _FACTOR * self._longest.get(phase, 0.0))
