"""Exchanges between ranks: checks correctness for each pair, and measures bandwidth and compute speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.metrics.timing import synchronise
from paceline.parallel.collectives import sum_over_ranks, wait_for_all
from paceline.runtime.detect import World
from paceline.tools.doctor.plant import Planted

_NUMBERS = 2**18  # a megabyte of float32
_PATTERN = 251  # a prime, so misplaced parts are detected
_PAIR_TRIES = 3
_ALL_PAIRS = 64  # ranks; beyond, only partners at distances 1, 2, 4, ...
_SIDES = {"cpu": 384, "cuda": 4096}  # of a matrix product: a few milliseconds at most
_PACE_S = 0.25


@dataclass(frozen=True)
class Sums:
    """For one rank: whether its own numbers are correct, and whether the sum over all ranks is correct."""

    is_own_right: bool
    is_sum_right: bool


def known_numbers(rank: int, device: str) -> Tensor:
    """Whole numbers, small enough for sums over thousands of ranks to be exact."""
    return (torch.arange(_NUMBERS, device=device) % _PATTERN + rank % 32).float()


def try_sums(world: World, planted: Planted) -> Sums:
    """An all-reduce of known numbers. Collective."""
    mine = known_numbers(world.rank, world.device)
    if planted.flips_a_bit():
        mine.view(torch.int32)[7] ^= 1 << 22
    is_own_right = torch.equal(mine.cpu(), known_numbers(world.rank, "cpu"))
    ranks = [rank % 32 for rank in range(world.world_size)]
    expected = (torch.arange(_NUMBERS) % _PATTERN).float() * len(ranks) + sum(ranks)
    total = sum_over_ranks(mine, world)
    return Sums(is_own_right, torch.equal(total.cpu(), expected))


def partners(rank: int, world_size: int) -> list[int]:
    """The partner of this rank in each round; itself in a round without a partner. All pairs run in parallel."""
    if world_size > _ALL_PAIRS:
        distances = [2**power for power in range((world_size - 1).bit_length())]
        found = [rank + step if rank // step % 2 == 0 else rank - step for step in distances]
        return [partner if partner < world_size else rank for partner in found]
    even = world_size + world_size % 2
    rounds = []
    for number in range(even - 1):
        # The circle method of round-robin tournaments: the last rank stays, the others move by one.
        if rank == even - 1:
            partner = number * (even // 2) % (even - 1)
        else:
            partner = (number - rank) % (even - 1)
            partner = even - 1 if partner == rank else partner
        rounds.append(partner if partner < world_size else rank)
    return rounds


def try_pairs(world: World, planted: Planted) -> dict[int, tuple[bool, float]]:
    """For each partner: whether its data arrived correctly, and the seconds of one exchange. Collective."""
    found = {}
    mine = known_numbers(world.rank, world.device)
    if planted.flips_a_bit():
        mine.view(torch.int32)[7] ^= 1 << 22
    for partner in partners(world.rank, world.world_size):
        if partner == world.rank:
            continue
        theirs = torch.zeros_like(mine)
        seconds = []
        for _ in range(_PAIR_TRIES):
            started = time.perf_counter()
            _swap(mine, theirs, partner, world)
            planted.burn(time.perf_counter() - started)
            seconds.append(time.perf_counter() - started)
        found[partner] = (torch.equal(theirs.cpu(), known_numbers(partner, "cpu")), min(seconds))
    return found


def _swap(mine: Tensor, theirs: Tensor, partner: int, world: World) -> None:
    both = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    synchronise(world.device)


def measure_pace(world: World, planted: Planted) -> float:
    """Seconds of one matrix product while every rank computes. Collective.

    Uses one thread per rank: threads that wait for each other on shared cores make a healthy rank look ten times
    slower than the others. The check of the cores reports a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure_pace_of_one_thread(world, planted)
    finally:
        torch.set_num_threads(threads)


def _measure_pace_of_one_thread(world: World, planted: Planted) -> float:
    side = _SIDES[torch.device(world.device).type]
    left, right = (torch.full((side, side), 0.5, device=world.device) for _ in range(2))
    work: Callable[[], object] = lambda: torch.mm(left, right)  # noqa: E731
    for _ in range(3):
        work()
    synchronise(world.device)
    wait_for_all(world)
    seconds: list[float] = []
    until = time.perf_counter() + _PACE_S
    while time.perf_counter() < until or len(seconds) < 3:
        started = time.perf_counter()
        work()
        synchronise(world.device)
        planted.burn(time.perf_counter() - started)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
