"""Lesson 7: figures computed from times, a correct timer, and answers that are in a plot."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.tools.course.lessons import find_lesson
from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item, cause_not_known

_REPEATS = [5.0, 5.2, 5.1, 9.9, 4.7]  # another program disturbed the fourth run
_WARM_UP_S = 0.5
_RANK_S = 0.1


def measured(machine: str, method: str) -> dict[int, float]:
    """Seconds per epoch by the number of ranks, from the table beside the lesson."""
    with (find_lesson("7").folder / "measured.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["machine"], row["method"]) == (machine, method)]
    return {int(row["ranks"]): float(row["seconds_per_epoch"]) for row in rows}


def _figures(person: ModuleType, rank: int, world_size: int) -> dict[str, Any]:
    times = measured("gpus", "ddp")
    return {
        "typical": float(person.typical_seconds(list(_REPEATS))),
        "speedups": [float(person.speedup(times, ranks)) for ranks in times],
        "efficiencies": [float(person.efficiency(times, ranks)) for ranks in times],
    }


def _are_close(found: list[float], right: list[float]) -> bool:
    # Quotients of floats may be formed in any order here.
    return len(found) == len(right) and all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(found, right, strict=True))


def check_figures(path: Path) -> None:
    found = on_ranks(path, 1, _figures)[0]
    typical, ordered = found["typical"], sorted(_REPEATS)
    if typical != ordered[len(ordered) // 2]:
        what = f"typical_seconds({_REPEATS}) is {typical:g}"
        if math.isclose(typical, sum(_REPEATS) / len(_REPEATS)):
            raise Failed("outlier-counted", what, "One disturbed run changes the mean. The median stays 5.1.")
        if typical == ordered[0]:
            raise Failed("best-run-only", what, "The fastest run is an exception. Take the median.")
        raise cause_not_known(what, "the median, 5.1.")
    times = measured("gpus", "ddp")
    right = [times[1] / seconds for seconds in times.values()]
    what = f"for {times} the speed-ups are {[round(value, 2) for value in found['speedups']]}"
    if not _are_close(found["speedups"], right):
        if _are_close(found["speedups"], [1 / value for value in right]):
            raise Failed(
                "upside-down-speedup",
                what,
                "Faster means more than 1: the time of one rank divided by that of n ranks.",
            )
        if _are_close(found["speedups"][1:], [times[n // 2] / times[n] for n in times if n > 1]):
            raise Failed(
                "moving-baseline", what, "Each is compared with the size before it. Compare all with one rank."
            )
        raise cause_not_known(what, "seconds[1] / seconds[ranks].")
    ideal = [value / ranks for value, ranks in zip(right, times, strict=True)]
    if not _are_close(found["efficiencies"], ideal):
        what = f"the efficiencies are {[round(value, 2) for value in found['efficiencies']]}"
        if _are_close(found["efficiencies"], right):
            raise Failed(
                "efficiency-is-speedup",
                what,
                "That is the speed-up. Divide it by the ideal, which is the number of ranks.",
            )
        raise cause_not_known(what, "speed-up divided by the number of ranks.")


def _time(person: ModuleType, rank: int, world_size: int) -> float:
    """With a clock that only `work` advances: the result does not depend on the load of this machine."""
    now = calls = 0.0

    def work() -> None:
        nonlocal now, calls
        now += _RANK_S * (rank + 1) + (_WARM_UP_S if calls == 0 else 0.0)
        calls += 1

    time.perf_counter = lambda: now
    return float(person.slowest_rank_seconds(work))


def check_clock(path: Path) -> None:
    found = on_ranks(path, 2, _time)
    slow = 2 * _RANK_S
    if all(math.isclose(seconds, slow, abs_tol=1e-6) for seconds in found):
        return
    seen = ", ".join(f"rank {rank} returns {seconds:.2f} s" for rank, seconds in enumerate(found))
    what = f"rank 0 needs {_RANK_S} s, rank 1 {slow} s, and the first call half a second more; {seen}"

    def is_like(*seconds: float) -> bool:
        return all(math.isclose(a, b, abs_tol=1e-6) for a, b in zip(found, seconds, strict=True))

    first, first_slow = _RANK_S + _WARM_UP_S, slow + _WARM_UP_S  # the first call of each rank
    both, both_slow = first + _RANK_S, first_slow + slow  # both calls
    if (
        is_like(first_slow, first_slow)
        or is_like(first, first_slow)
        or is_like(both_slow, both_slow)
        or is_like(both, both_slow)
    ):
        raise Failed(
            "warm-up-counted",
            what,
            "The first call loads, compiles and allocates. Call work() once before you start the timer.",
        )
    if is_like(0.0, 0.0):
        raise Failed("nothing-timed", what, "No call of work() is between the two times: start, work(), stop.")
    if is_like(_RANK_S, slow):
        raise Failed(
            "own-clock-only",
            what,
            "A step takes as long as its slowest rank: all_reduce with ReduceOp.MAX sends its time to all ranks.",
        )
    if is_like(_RANK_S, _RANK_S):
        raise Failed("fastest-rank", what, "All ranks wait for the slowest one: ReduceOp.MAX, not MIN.")
    if is_like(1.5 * _RANK_S, 1.5 * _RANK_S):
        raise Failed("average-rank", what, "All ranks wait for the slowest one: ReduceOp.MAX, not the mean.")
    if is_like(3 * _RANK_S, 3 * _RANK_S):
        raise Failed(
            "times-added", what, "The ranks work at the same time. all_reduce adds by default: use ReduceOp.MAX."
        )
    raise cause_not_known(what, "time.perf_counter() before and after the second call of work(), then the maximum.")


def _answers(person: ModuleType, rank: int, world_size: int) -> list[Any]:
    return [person.FASTEST_ON_GPUS, person.MOST_RANKS_WITH_80_PERCENT, person.WHERE_FSDP_LOSES]


def check_answers(path: Path) -> None:
    fastest, most, part = on_ranks(path, 1, _answers)[0]
    if not (isinstance(fastest, tuple) and len(fastest) == 2 and fastest == ("ddp", 8)):
        raise Failed(
            "misread-fastest",
            f"FASTEST_ON_GPUS is {fastest!r}",
            "In a plot of seconds, low is fast. Find the lowest point: which method, how many ranks?",
        )
    if most != 4:
        times = measured("gpus", "ddp")
        listed = ", ".join(f"{n}: {times[1] / seconds / n:.0%}" for n, seconds in times.items())
        raise Failed(
            "misread-efficiency",
            f"MOST_RANKS_WITH_80_PERCENT is {most!r}; DDP's efficiencies are {listed}",
            "The largest number of ranks whose DDP efficiency is still 80 % or more.",
        )
    if part != "communication":
        raise Failed(
            "misread-cause",
            f"WHERE_FSDP_LOSES is {part!r}",
            "Compare the parts of a step for DDP and FSDP on two cores and two ranks: which differs most, in ms?",
        )


ITEMS = (
    Item("median, speed-up, efficiency", check_figures, ("typical_seconds", "speedup", "efficiency")),
    Item("the same time on all ranks", check_clock, ("slowest_rank_seconds",)),
    Item("the answers are in the plots", check_answers),
)
