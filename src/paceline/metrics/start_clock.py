"""Where the time before the first step goes, by stage, and how long the set-up that depends on the data took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# import: from the start of the command until the rank runs. group: device, process group, run folder. data: loading,
# and scores for --keep-share. model: building, strategy, optimizer. compile_and_capture: on GPUs, also trying kernels.
STAGES = ("import", "group", "data", "model", "compile_and_capture", "other")


class StartClock:
    """The start of one rank. Every moment belongs to one stage."""

    def __init__(self, age_s: float = 0.0) -> None:
        """`age_s`: how long ago the command was started."""
        self._seconds = {"import": age_s}
        self._stage, self._since_s = "other", time.perf_counter()
        self._is_over = False
        self.set_up_s = 0.0

    def enter(self, stage: str) -> None:
        """End the current stage and begin this one. Ignored after the first step."""
        if self._is_over:
            return
        now_s = time.perf_counter()
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now_s - self._since_s
        self._stage, self._since_s = stage, now_s

    def end(self) -> None:
        """The first step begins."""
        self.enter("other")
        self._is_over = True

    @contextmanager
    def set_up_from_data(self) -> Iterator[None]:
        """A part of a stage that computes from the training data, as whitening does. Published records count it."""
        began_s = time.perf_counter()
        yield
        self.set_up_s += time.perf_counter() - began_s

    def summary(self) -> dict[str, float]:
        """Seconds by stage, and in all."""
        parts = {stage: round(self._seconds.get(stage, 0.0), 3) for stage in STAGES}
        return {"seconds": round(sum(self._seconds.values()), 3), **parts}


def describe_start(summary: dict[str, float]) -> str:
    parts = ", ".join(f"{stage.replace('_', ' ')} {summary[stage]:.1f}" for stage in STAGES)
    return f"{summary['seconds']:.1f} s until the first step: {parts}"
