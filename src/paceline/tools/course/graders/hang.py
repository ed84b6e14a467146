"""Lesson 2, diagnosis: which ranks wait in a hang and why, and the repaired function."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.tools.course.lessons import find_lesson
from paceline.tools.course.ranks import describe_endings, on_ranks, try_ranks
from paceline.tools.course.verdict import Failed, Item, cause_not_known

_RANKS = 4
_QUESTION = (1, 3)  # the ranks that want to stop, in the exercise's question
_WAITING = {0, 2}
_CAUSES = ("skipped collective", "different collectives", "different order", "no process group")


def _read_answers(person: ModuleType, rank: int, world_size: int) -> tuple[Any, Any]:
    return person.WAITING_RANKS, person.CAUSE


def _ask(person: ModuleType, rank: int, world_size: int, wishes: tuple[int, ...]) -> bool:
    return bool(person.any_rank_wants_to_stop(rank in wishes))


def check_diagnosis(path: Path) -> None:
    waiting, cause = on_ranks(path, 1, _read_answers)[0]
    if not isinstance(waiting, set | list | tuple) or not all(isinstance(rank, int) for rank in waiting):
        raise Failed("no-ranks", f"WAITING_RANKS is {waiting!r}", "A set of ranks, such as {0, 1}.")
    if set(waiting) != _WAITING:
        # The function as the exercise gives it: the evidence.
        endings = try_ranks(find_lesson("2").exercise, _RANKS, _ask, _QUESTION)
        raise Failed(
            "other-ranks-wait",
            f"WAITING_RANKS is {waiting}. Ranks {_QUESTION} want to stop; the check ran the defective function:\n"
            + describe_endings(endings),
            "Follow one rank that wants to stop and one that does not, line by line. Which of them calls all_reduce?",
        )
    if cause not in _CAUSES:
        raise Failed("no-cause", f"CAUSE is {cause!r}", f"One of {', '.join(map(repr, _CAUSES))}.")
    if cause != "skipped collective":
        raise Failed(
            "other-cause",
            f"CAUSE is {cause!r}",
            "How many collectives does each rank call? Ranks 0 and 2 are in all_reduce; where are ranks 1 and 3?",
        )


def check_repair(path: Path) -> None:
    for wishes in ((2,), (), tuple(range(_RANKS))):
        found = on_ranks(path, _RANKS, _ask, wishes)
        if found == [bool(wishes)] * _RANKS:
            continue
        what = f"if the ranks {list(wishes)} want to stop, the ranks return {found}"
        if len(set(found)) > 1:
            raise Failed(
                "ranks-disagree",
                what,
                "A rank that stops alone leaves the others in the next collective. All must return the same answer.",
            )
        raise cause_not_known(what, "True on every rank if at least one rank wants to stop, otherwise False.")


ITEMS = (
    Item("diagnosis: which ranks wait, and why", check_diagnosis, ("WAITING_RANKS", "CAUSE")),
    Item("the hang is repaired: all ranks get one answer", check_repair, ("any_rank_wants_to_stop",)),
)
