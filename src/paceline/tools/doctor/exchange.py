"""Exchanges between ranks: correctness for each pair, bandwidth, compute speed, and the checks on them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.metrics.timing import synchronise
from paceline.parallel.collectives import sum_over_ranks, wait_for_all
from paceline.runtime.detect import World
from paceline.tools.bench.collectives import Fit, Row
from paceline.tools.bench.limits import Limit
from paceline.tools.doctor.findings import DoctorFinding, failed, passed, warned
from paceline.tools.doctor.peers import blame, name_ranks
from paceline.tools.doctor.request import InjectedFaults

# --- Measurements -----------------------------------------------------------------------------------------------------


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


def try_sums(world: World, faults: InjectedFaults) -> Sums:
    """An all-reduce of known numbers. Collective."""
    mine = known_numbers(world.rank, world.device)
    if faults.flips_a_bit():
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


def try_pairs(world: World, faults: InjectedFaults) -> dict[int, tuple[bool, float]]:
    """For each partner: whether its data arrived correctly, and the seconds of one exchange. Collective."""
    found = {}
    mine = known_numbers(world.rank, world.device)
    if faults.flips_a_bit():
        mine.view(torch.int32)[7] ^= 1 << 22
    for partner in partners(world.rank, world.world_size):
        if partner == world.rank:
            continue
        theirs = torch.zeros_like(mine)
        seconds = []
        for _ in range(_PAIR_TRIES):
            started = time.perf_counter()
            _swap(mine, theirs, partner, world)
            faults.slow_down(time.perf_counter() - started)
            seconds.append(time.perf_counter() - started)
        found[partner] = (torch.equal(theirs.cpu(), known_numbers(partner, "cpu")), min(seconds))
    return found


def _swap(mine: Tensor, theirs: Tensor, partner: int, world: World) -> None:
    both = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    synchronise(world.device)


def measure_pace(world: World, faults: InjectedFaults) -> float:
    """Seconds of one matrix product while every rank computes. Collective.

    Uses one thread per rank: threads that wait for each other on shared cores make a healthy rank look ten times
    slower than the others. The check of the cores reports a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure_pace_of_one_thread(world, faults)
    finally:
        torch.set_num_threads(threads)


def _measure_pace_of_one_thread(world: World, faults: InjectedFaults) -> float:
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
        faults.slow_down(time.perf_counter() - started)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


# --- Checks -----------------------------------------------------------------------------------------------------------


SLOW_WARN, SLOW_FAIL = 1.5, 2.0  # ratio to the time of the others
_SLOW_PAIR = 4.0
_LEAST_OF_LINK = {True: 0.02, False: 0.15}  # by whether the limit was measured: memory copies are much faster than gloo
_SLOW_LATENCY_S = 0.02
Pairs = Sequence[Mapping[int, tuple[bool, float]]]  # by rank, by partner: is correct, seconds
_SUSPECT = "exclude that node (--exclude) or GPU (CUDA_VISIBLE_DEVICES); test its memory, GPU and network card"


def check_sums(sums: Sequence[Sums], pairs: Pairs, hosts: Sequence[str]) -> DoctorFinding:
    """Whether all-reduce is correct. If not, names the faulty rank."""
    arrived_wrong = [
        (sender, rank) for rank, row in enumerate(pairs) for sender, (right, _) in row.items() if not right
    ]
    if all(one.is_own_right and one.is_sum_right for one in sums) and not arrived_wrong:
        return passed("all-reduce", f"correct on {len(sums)} ranks, and between every pair")
    wrong = wrong_ranks(sums, arrived_wrong)
    if wrong:
        what = f"wrong sums: the numbers of {name_ranks(wrong, hosts)} are wrong"
        return failed("all-reduce", what, _SUSPECT, nodes=blame(wrong, hosts), wrong_ranks=wrong)
    if arrived_wrong:
        sender, rank = arrived_wrong[0]
        what = f"data from {name_ranks([sender], hosts)} arrives corrupted at {name_ranks([rank], hosts)}"
        suspects = sorted({sender, rank})
        remedy = "exclude one of the two nodes, then the other, to find the faulty one; check its network card, cable"
        return failed("all-reduce", what, remedy, nodes=blame(suspects, hosts), wrong_ranks=suspects)
    got = [rank for rank, one in enumerate(sums) if not one.is_sum_right]
    what = f"every pair exchanges correctly, but the sum over all is wrong at {name_ranks(got, hosts)}"
    return failed("all-reduce", what, "try another torch or NCCL, or NCCL_ALGO=Ring; do not use results from here")


def wrong_ranks(sums: Sequence[Sums], arrived_wrong: Sequence[tuple[int, int]]) -> list[int]:
    """Ranks whose own numbers are wrong; otherwise the common sender or receiver of all wrong messages.

    With one wrong message between two ranks, sender and receiver cannot be distinguished: then none is named.
    """
    own = [rank for rank, one in enumerate(sums) if not one.is_own_right]
    if own or len(sums) < 3:
        return own
    for end in (0, 1):
        ends = {pair[end] for pair in arrived_wrong}
        others = {pair[1 - end] for pair in arrived_wrong}
        if len(ends) == 1 and len(others) > 1:
            return sorted(ends)
    return []


def slowness(seconds: Sequence[float]) -> list[float]:
    """How many times longer each rank takes than the median of the others."""
    if len(seconds) == 1:
        return [1.0]
    rest = [statistics.median([*seconds[:rank], *seconds[rank + 1 :]]) for rank in range(len(seconds))]
    return [mine / max(others, 1e-9) for mine, others in zip(seconds, rest, strict=True)]


def check_pace(seconds: Sequence[float], hosts: Sequence[str]) -> DoctorFinding:
    factors = slowness(seconds)
    slow = [rank for rank, factor in enumerate(factors) if factor >= SLOW_WARN]
    details = {"seconds": list(seconds)}
    if not slow:
        slowest = f"; the slowest takes {max(factors):.2f} times the others' time" if len(seconds) > 1 else ""
        work = statistics.median(seconds)
        what = f"{1000 * work:.2f} ms for a matrix product on {len(seconds)} rank{'s' if len(seconds) > 1 else ''}"
        return passed("pace", what + slowest, **details)
    worst = max(slow, key=lambda rank: factors[rank])
    is_failure = factors[worst] >= SLOW_FAIL
    if is_failure:  # exclude only failed nodes, not those that are a little slow
        slow = [rank for rank in slow if factors[rank] >= SLOW_FAIL]
    report = failed if is_failure else warned
    what = f"{name_ranks([worst], hosts)} is slow: {factors[worst]:.1f} times the others' time for the same work"
    remedy = "on that node check other programs (top), throttling (nvidia-smi -q -d PERFORMANCE), the CPU governor and "
    remedy += "cores bound twice; or exclude it (--exclude)"
    return report("pace", what, remedy, nodes=blame(slow, hosts), slow_ranks=slow, **details)


def check_pairs(pairs: Pairs, hosts: Sequence[str]) -> DoctorFinding:
    """Finds slow links. Links inside a node and between nodes are compared separately."""
    by_kind: dict[bool, dict[tuple[int, int], float]] = {True: {}, False: {}}
    for rank, row in enumerate(pairs):
        for partner, (_, seconds) in row.items():
            by_kind[hosts[rank] == hosts[partner]][rank, partner] = seconds
    slow = {}
    for ways in by_kind.values():
        usual = statistics.median(ways.values()) if len(ways) > 2 else float("inf")
        # A slow link is slow in both directions; a random delay is not.
        best = {(a, b): min(seconds, ways.get((b, a), seconds)) for (a, b), seconds in ways.items()}
        slow.update({pair: seconds / usual for pair, seconds in best.items() if seconds > _SLOW_PAIR * usual})
    if not slow:
        longest = max(seconds for ways in by_kind.values() for seconds in ways.values())
        return passed("pairs", f"every pair exchanges 1 MB, in {1000 * longest:.1f} ms at most")
    (first, second), factor = max(slow.items(), key=lambda item: item[1])
    what = f"the link between {name_ranks([first], hosts)} and {name_ranks([second], hosts)} takes {factor:.1f} times "
    what += f"as long as others ({len(slow)} slow of {sum(map(len, by_kind.values()))})"
    remedy = "check cable, port, duplex of that link (ethtool, ibstat), and the PCIe root of GPUs (nvidia-smi topo -m)"
    return warned("pairs", what, remedy, nodes=blame([first, second], hosts))


def check_links(rows: Sequence[Row], fits: Sequence[Fit], limit: Limit | None) -> DoctorFinding:
    best = max(row.bus_bytes_per_s for row in rows)
    latency = min(row.median_s for row in rows)
    what = f"all-reduce {best / 1e9:.2f} GB/s, {1e6 * latency:,.0f} us for a small one"
    details: dict[str, Any] = {"bytes_per_s": best, "latency_s": latency}
    if any(not row.is_right for row in rows):
        return failed("links", f"{what}, and some of its sums are wrong", _SUSPECT, **details)
    if latency > _SLOW_LATENCY_S:
        return warned("links", what, "the network is slow, or ranks share cores", **details)
    if limit is None or limit.bytes_per_s is None:
        return passed("links", f"{what} ({limit.name if limit else 'no limit known'})", **details)
    share = best / limit.bytes_per_s
    what += f"; {share:.0%} of {limit.bytes_per_s / 1e9:.1f} GB/s ({limit.name})"
    if share < _LEAST_OF_LINK[limit.is_measured]:
        remedy = "NCCL_DEBUG=INFO shows the chosen interface; NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME select another one"
        return warned("links", what, f"{remedy}; paceline bench --what collectives shows more", **details)
    return passed("links", what, **details)


def check_training(alone: Sequence[str], together: Sequence[str], known: str, hosts: Sequence[str]) -> DoctorFinding:
    """Hashes of the weights, by rank: of the training of each rank alone, and of the training together."""
    wrong = [rank for rank, found in enumerate(alone) if found != known]
    details = {"known": known, "alone": list(alone), "together": list(together)}
    if wrong:
        what = f"30 steps of training give wrong weights on {name_ranks(wrong, hosts)}: {alone[wrong[0]][:12]}, not "
        return failed("training", what + known[:12], _SUSPECT, nodes=blame(wrong, hosts), wrong_ranks=wrong, **details)
    astray = [rank for rank, found in enumerate(together) if found != known]
    if astray:
        what = f"each rank alone trains correctly, but together {name_ranks(astray, hosts)} get wrong weights: "
        what += f"{together[astray[0]][:12]}, not {known[:12]}"
        return failed("training", what, "data is corrupted between ranks: see all-reduce and pairs", **details)
    how = f"by each of {len(alone)} ranks alone and by all together" if together else "by one rank"
    return passed("training", f"30 steps {how}: the known weights, bit for bit ({known[:12]})", **details)
