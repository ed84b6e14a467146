"""All-reduce, all-gather and reduce-scatter over a range of message sizes: time, bandwidth and correctness.

A size is that of the whole collective: the summed vector, or all gathered or scattered data. Algorithm bandwidth is the
size divided by the time. Bus bandwidth counts the bytes that each rank must send at least, so it can be compared with
the speed of a link for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.metrics.timing import choose_rounds, gather_numbers, mean_over_ranks, time_rounds
from paceline.runtime.detect import World

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter")
# torch 2.13 renamed these two.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_LATENCY_SHARE = 0.1  # of the time of a bucket
_LARGEST_BUCKET_MB = 200  # larger ones leave too little to overlap
_PATTERN = 7  # period of the test values: small whole numbers with exact sums, in which misplaced parts are detected


@dataclass(frozen=True)
class Row:
    """One collective at one size, over all ranks."""

    operation: str
    size_bytes: int
    rounds: int
    median_s: float
    p95_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    is_right: bool  # every number is correct on every rank


@dataclass(frozen=True)
class Fit:
    """seconds = latency_s + bytes on the bus / bytes_per_s."""

    operation: str
    latency_s: float
    bytes_per_s: float | None  # None when times do not grow with the size


def measure(
    world: World,
    sizes: Sequence[int],
    *,
    seconds_per_size: float = 0.3,
    operations: Sequence[str] = OPERATIONS,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Every operation at every size. Collective."""
    rows = []
    for operation in operations:
        for size in sizes:
            rows.append(_measure_one(operation, size, world, seconds_per_size))
            on_row(rows[-1])
    return rows


def _measure_one(operation: str, size_bytes: int, world: World, seconds: float) -> Row:
    exchange = Exchange(operation, size_bytes, world)
    rounds = choose_rounds(exchange.run, world, seconds)
    times = mean_over_ranks(time_rounds(exchange.run, world.device, rounds), world)
    is_right = exchange.check()
    everyone_is_right = all(row[0] == 1.0 for row in gather_numbers([float(is_right)], world))
    bandwidth = exchange.size_bytes / times.median_s
    factor = bus_factor(operation, world.world_size)
    return Row(
        operation=operation,
        size_bytes=exchange.size_bytes,
        rounds=rounds,
        median_s=times.median_s,
        p95_s=times.p95_s,
        algorithm_bytes_per_s=bandwidth,
        bus_bytes_per_s=bandwidth * factor,
        is_right=everyone_is_right,
    )


def bus_factor(operation: str, world_size: int) -> float:
    """The minimum fraction of a message that every rank must send."""
    share = (world_size - 1) / world_size
    return 2 * share if operation == "all-reduce" else share


class Exchange:
    """One collective with its buffers. The size is rounded up to equal parts for all ranks."""

    def __init__(self, operation: str, size_bytes: int, world: World) -> None:
        ranks = world.world_size
        part = -(-size_bytes // (4 * ranks))  # float32 numbers per rank
        self._operation = operation
        self._world = world
        self._whole = torch.zeros(part * ranks, device=world.device)
        self._part = torch.zeros(part, device=world.device)

    @property
    def size_bytes(self) -> int:
        return self._whole.nbytes

    def run(self) -> None:
        if self._operation == "all-reduce":
            dist.all_reduce(self._whole)
        elif self._operation == "all-gather":
            _all_gather(self._whole, self._part)
        else:
            _reduce_scatter(self._part, self._whole)

    def check(self) -> bool:
        """Run it once more with known numbers, and compare everything that this rank received."""
        rank, ranks = self._world.rank, self._world.world_size
        pattern = torch.arange(self._whole.numel(), device=self._whole.device).remainder(_PATTERN).float() + 1
        sum_of_ranks = ranks * (ranks + 1) // 2
        mine = slice(rank * self._part.numel(), (rank + 1) * self._part.numel())
        self._whole.copy_(pattern * (rank + 1))
        self._part.copy_(pattern[mine] * (rank + 1))
        self.run()
        if self._operation == "all-reduce":
            return torch.equal(self._whole, pattern * sum_of_ranks)
        if self._operation == "reduce-scatter":
            return torch.equal(self._part, pattern[mine] * sum_of_ranks)
        return torch.equal(self._whole, _scale_parts(pattern, ranks))


def _scale_parts(pattern: Tensor, ranks: int) -> Tensor:
    """Multiply each rank's part of the pattern by its rank + 1."""
    numbers = torch.arange(1, ranks + 1, device=pattern.device, dtype=pattern.dtype)
    return (pattern.view(ranks, -1) * numbers[:, None]).view(-1)


def fit_rows(rows: Sequence[Row], world_size: int) -> list[Fit]:
    """A linear fit to each operation's times, if it has two sizes or more."""
    fits = []
    for operation in dict.fromkeys(row.operation for row in rows):
        own = [row for row in rows if row.operation == operation]
        sizes = [row.size_bytes * bus_factor(operation, world_size) for row in own]
        if len(set(sizes)) > 1:
            fits.append(Fit(operation, *fit_line(sizes, [row.median_s for row in own])))
    return fits


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float | None]:
    """Latency and bandwidth with the smallest relative errors, so every size counts equally."""
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / np.asarray(seconds))
    if slope <= 0:  # times that do not grow with the size are only latency
        return float(np.mean(seconds)), None
    return max(0.0, float(start)), 1 / float(slope)


def bucket_size_mb(fits: Sequence[Fit], world_size: int) -> int | None:
    """The smallest bucket of gradients whose all-reduce spends at most a tenth of its time on latency.

    Smaller buckets start earlier and overlap better with the backward pass; larger ones have less latency. None if the
    links were not measured. A pure function of times that are means over all ranks, so ranks agree.
    """
    fit = next((fit for fit in fits if fit.operation == "all-reduce"), None)
    if fit is None or fit.bytes_per_s is None or world_size == 1:
        return None
    on_the_bus = (1 / _LATENCY_SHARE - 1) * fit.latency_s * fit.bytes_per_s
    size = on_the_bus / bus_factor("all-reduce", world_size)
    return min(max(math.ceil(size / 2**20), 1), _LARGEST_BUCKET_MB)
