"""Repeat work and measure how long each round takes on its device.

On a GPU each round is measured between two CUDA events, so host time counts only if the GPU waits for it. On a CPU
the host's clock is enough.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.parallel.collectives import gather_lanes
from paceline.runtime.detect import World

Work = Callable[[], object]
_WARM_UP_ROUNDS = 3
_MANY = 10
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 1000
_MOST_REPEATS = 200


@dataclass(frozen=True)
class Rounds:
    """Seconds of each round."""

    seconds: tuple[float, ...]

    @property
    def count(self) -> int:
        return len(self.seconds)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p95_s(self) -> float:
        """The 95th percentile."""
        return sorted(self.seconds)[math.ceil(0.95 * self.count) - 1]


def synchronise(device: str) -> None:
    """Wait until the device has finished all queued work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def time_rounds(work: Work, device: str, rounds: int) -> Rounds:
    """Run `work` for this number of rounds."""
    if device.startswith("cuda"):
        return _time_on_gpu(work, device, rounds)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return Rounds(tuple(seconds))


def _time_on_gpu(work: Work, device: str, rounds: int) -> Rounds:
    with torch.cuda.device(device):
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        torch.cuda.synchronize(device)
        for start, end in pairs:
            start.record()
            work()
            end.record()
        torch.cuda.synchronize(device)
    return Rounds(tuple(start.elapsed_time(end) / 1e3 for start, end in pairs))


def repeat(work: Work, device: str, seconds: float) -> Rounds:
    """Two warm-up rounds, then as many as fit into the time, but at least three."""
    time_rounds(work, device, 2)
    synchronise(device)
    started = time.perf_counter()
    first = time_rounds(work, device, 1)
    once = max(time.perf_counter() - started, 1e-9)
    rest = time_rounds(work, device, max(2, min(_MOST_REPEATS, round(seconds / once))))
    return Rounds(first.seconds + rest.seconds)


def choose_rounds(work: Work, world: World, seconds: float) -> int:
    """Warm up and return how many rounds fill this time: the same number on every rank."""
    # The first round opens connections and selects or compiles kernels.
    once = largest_over_ranks(time_rounds(work, world.device, 2).seconds[-1], world)
    if once < seconds / _MANY:  # short work needs a better estimate
        once = largest_over_ranks(time_rounds(work, world.device, _WARM_UP_ROUNDS).median_s, world)
    return max(_LEAST_ROUNDS, min(_MOST_ROUNDS, round(seconds / max(once, 1e-9))))


def gather_numbers(values: Sequence[float], world: World) -> list[list[float]]:
    """All-gather the numbers of every rank, in rank order."""
    row = torch.tensor([values], dtype=torch.float64, device=world.device)
    rows: list[list[float]] = gather_lanes(row, world).tolist()
    return rows


def largest_over_ranks(value: float, world: World) -> float:
    return max(row[0] for row in gather_numbers([value], world))


def mean_over_ranks(rounds: Rounds, world: World) -> Rounds:
    """Average each round over ranks. Ranks that work together differ only in how long they wait."""
    everyone = gather_numbers(rounds.seconds, world)
    return Rounds(tuple(statistics.fmean(column) for column in zip(*everyone, strict=True)))
