# hint: fastest-rank
# Takes the minimum over ranks.
"""Lesson 7: benchmarks, and reading the plots. Fill the gaps, then: paceline course check 7

The plots are in the lesson's picture (paceline course show 7 gives its path). The numbers are in measured.csv there.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def typical_seconds(repeats: list[float]) -> float:
    """One number for several equal runs. A single disturbed run does not change it."""
    return statistics.median(repeats)


def speedup(seconds: dict[int, float], ranks: int) -> float:
    """How many times as fast as one rank. `seconds` by number of ranks: {1: 7.44, 2: 4.58, ...}."""
    return seconds[1] / seconds[ranks]


def efficiency(seconds: dict[int, float], ranks: int) -> float:
    """The speed-up divided by the ideal: 1.0 if n ranks are n times as fast as one."""
    return speedup(seconds, ranks) / ranks


def slowest_rank_seconds(work: Callable[[], None]) -> float:
    """The time of `work` on the slowest rank, the same number on every rank. The first call takes longer."""
    work()
    dist.barrier()
    start = time.perf_counter()
    work()
    mine = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MIN)
    return mine.item()


# The answers are in the plots.
FASTEST_ON_GPUS = ("ddp", 8)
MOST_RANKS_WITH_80_PERCENT = 4
WHERE_FSDP_LOSES = "communication"
