"""A rank that is much slower than the others is named, and left alone."""

from __future__ import annotations

import logging
import statistics

from torch import Tensor

from paceline.runtime.detect import World

_log = logging.getLogger("paceline")
_FACTOR = 3.0
_INTERVALS = 2  # in a row, so that a hiccup is not a straggler
_LEAST_S = 0.05  # of a whole interval: below that, noise


class Stragglers:
    """Compares the time ranks spend on their own work, which waiting for each other does not level out."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._slow_intervals = [0] * world.world_size
        self.named: list[int] = []

    def look(self, busy_s: Tensor, step: int) -> None:
        """`busy_s` has a row per lane, in the order of ranks; the same on every rank."""
        if self._world.world_size == 1:
            return
        times = busy_s.view(self._world.world_size, -1).sum(1).tolist()
        for rank, mine in enumerate(times):
            usual = statistics.median(times[:rank] + times[rank + 1 :])
            is_slow = mine > _FACTOR * usual and mine - usual > _LEAST_S
            self._slow_intervals[rank] = self._slow_intervals[rank] + 1 if is_slow else 0
            if self._slow_intervals[rank] == _INTERVALS:
                self.named.append(rank)
                if self._world.is_primary:
                    _log.warning(
                        "warning: rank %d is slow: %.1f times the others' work time since some steps (step %d)",
                        *(rank, mine / max(usual, 1e-9), step),
                    )
