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
    return ...  # TODO


def speedup(seconds: dict[int, float], ranks: int) -> float:
    """How many times as fast as one rank. `seconds` by number of ranks: {1: 7.44, 2: 4.58, ...}."""
    return ...  # TODO


def efficiency(seconds: dict[int, float], ranks: int) -> float:
    """The speed-up divided by the ideal: 1.0 if n ranks are n times as fast as one."""
    return ...  # TODO


def slowest_rank_seconds(work: Callable[[], None]) -> float:
    """The time of `work` on the slowest rank, the same number on every rank. The first call takes longer."""
    ...  # TODO: what must happen before the clock starts?
    dist.barrier()
    start = time.perf_counter()
    work()
    mine = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    ...  # TODO: replace this rank's time by the slowest rank's
    return mine.item()


# The answers are in the plots.
FASTEST_ON_GPUS = ...  # TODO: method and number of ranks, as in ("fsdp", 2)
MOST_RANKS_WITH_80_PERCENT = ...  # TODO: DDP on GPUs: the largest number of ranks with at least 80 %?
WHERE_FSDP_LOSES = ...  # TODO: two cores, two ranks: "data", "forward", "backward", "communication" or "update"?
