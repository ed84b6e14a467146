"""Clocks that do not count the time in which this process was suspended.

A suspended job (Ctrl-Z, Slurm's suspend, a paused container, a closed laptop) continues after minutes or hours. The
monotonic clock may count this time. A loop that reads the clock several times a second sees a suspension as a long gap
between two readings. A deadline that counts the gap would report a failure where nothing failed.
"""

from __future__ import annotations

import time

from paceline.runtime.pulse import Beat

GAP_S = 2.0  # a longer gap between two readings is a suspension: no scheduler delays a ready thread this long


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
