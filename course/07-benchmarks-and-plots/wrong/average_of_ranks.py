# hint: average-rank
# The slow rank hides in the mean.
"""Lesson 7: benchmarks, and reading the plots. Fill the gaps, then: paceline course check 7

The plots are in the lesson's picture (paceline course show 7 says where it is), their numbers in measured.csv there.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def typical_seconds(repeats: list[float]) -> float:
    """One number for several runs of the same thing, which a single disturbed run does not change."""
    return statistics.median(repeats)


def speedup(seconds: dict[int, float], ranks: int) -> float:
    """How many times as fast as one rank. `seconds` are by number of ranks: {1: 7.44, 2: 4.58, ...}."""
    return seconds[1] / seconds[ranks]


def efficiency(seconds: dict[int, float], ranks: int) -> float:
    """The speed-up as a part of the ideal one: 1.0 if n ranks are n times as fast as one."""
    return speedup(seconds, ranks) / ranks


def slowest_rank_seconds(work: Callable[[], None]) -> float:
    """How long `work` takes on the slowest rank, the same number on every rank. Its first call takes longer."""
    work()
    dist.barrier()
    start = time.perf_counter()
    work()
    mine = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(mine)
    mine /= dist.get_world_size()
    return mine.item()


# Answers to read off the plots.
FASTEST_ON_GPUS = ("ddp", 8)
MOST_RANKS_WITH_80_PERCENT = 4
WHERE_FSDP_LOSES = "communication"
