"""Measure the phases of a step: data, forward, backward, communication, update, and the rest.

The clock is called at every phase that a rank enters. On a CPU the host's clock is enough. On a GPU the host runs ahead
of the device, so the phases of some steps are marked with CUDA events. The whole step needs no events, because it
synchronises with the device once.
"""

from __future__ import annotations

import statistics
import time
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # studies import the phase names without torch
    import torch

STEP_PHASES = ("data", "forward", "backward", "communication", "update", "other")
_INSIDE = {"data": "data", "forward": "forward", "backward": "backward", "reduce": "communication", "update": "update"}
WARMUP_STEPS = 10
_MARK_EVERY = 8  # on a GPU: recording events costs host time


class PhaseClock:
    """Phase times of this rank, over the steps of this attempt after the warm-up."""

    def __init__(self, device: str = "cpu") -> None:
        self._is_cuda = device.startswith("cuda")
        self._step_s = array("d")
        self._totals = dict.fromkeys(STEP_PHASES, 0.0)
        self._bytes = 0
        self._counted = 0  # steps in the totals
        self._phase, self._since, self._step_began = "", 0.0, 0.0
        self._marks: list[tuple[str, torch.cuda.Event]] = []  # of the current step
        self._unread: list[tuple[str, torch.cuda.Event]] = []  # of the marked step before
        self._is_paused = False

    def enter(self, phase: str) -> None:
        """Start a phase and end the previous one. `data`, and any phase outside of a step, ends the step."""
        if self._is_paused:
            return
        now = time.perf_counter()
        is_inside = phase in _INSIDE or phase == "other"
        if self._phase and (phase == "data" or not is_inside):
            self._end_step(now)
        elif self._phase and not self._is_cuda:
            self._totals[self._phase] += now - self._since
        if not is_inside:
            self._phase = ""
            return
        if phase == "data":
            self._step_began = now
            if len(self._step_s) == WARMUP_STEPS:
                self._totals = dict.fromkeys(STEP_PHASES, 0.0)
                self._bytes, self._counted = 0, 0
        self._phase, self._since = _INSIDE.get(phase, phase), now
        if self._is_cuda and self._is_marked():
            self._mark(self._phase)

    def pause(self) -> None:
        """Do not count the next steps: the profiler slows them down."""
        self.enter("pause")
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def waited(self, seconds: float, size_bytes: int) -> None:
        """Count this part of the current phase as communication."""
        if self._is_paused:
            return
        self._bytes += size_bytes
        if self._marks or not self._is_cuda:
            self._totals["communication"] += seconds
            self._totals[self._phase] -= seconds

    def _end_step(self, now: float) -> None:
        self._step_s.append(now - self._step_began)
        if self._is_cuda:
            self._read_marks()
            if self._marks:
                self._mark("other")
                self._unread, self._marks = self._marks, []
        else:
            self._totals[self._phase] += now - self._since
            self._counted += 1

    def _is_marked(self) -> bool:
        return bool(self._marks) or (self._phase == "data" and len(self._step_s) % _MARK_EVERY == 0)

    def _mark(self, phase: str) -> None:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def _read_marks(self) -> None:
        """Called one step after the marked one. That step has synchronised, so reading the events does not block."""
        if not self._unread:
            return
        self._unread[-1][1].synchronize()
        for (phase, begin), (_, end) in pairwise(self._unread):
            self._totals[phase] += begin.elapsed_time(end) / 1000
        self._counted += 1
        self._unread = []

    def summary(self, *, is_waiting_known: bool = True) -> dict[str, Any]:
        """Milliseconds per step, without the warm-up if the attempt was longer."""
        self.enter("end")
        self._read_marks()
        has_warmed_up = len(self._step_s) > WARMUP_STEPS
        steps = [1000 * seconds for seconds in self._step_s[WARMUP_STEPS if has_warmed_up else 0 :]]
        if not steps:
            return {}
        mean = statistics.fmean(steps)
        phases = {name: 1000 * total / max(self._counted, 1) for name, total in self._totals.items()}
        phases["other"] += mean - sum(phases.values())
        breakdown: dict[str, float | None] = dict(phases)
        if not is_waiting_known:
            breakdown["communication"] = None
        return {
            "steps": len(steps),
            "step_ms": {"mean": mean, "p50": _quantile(steps, 0.5), "p95": _quantile(steps, 0.95)},
            "breakdown_ms": breakdown,
            "communicated_bytes_per_step": round(self._bytes / max(len(steps), 1)),
        }


def _quantile(values: list[float], share: float) -> float:
    """The quantile, with linear interpolation."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
