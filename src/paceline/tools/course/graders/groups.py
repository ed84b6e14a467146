"""Lesson 2: joining a group, knowing who one is, adding and telling, leaving."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item


def _join(person: ModuleType, rank: int, world_size: int) -> tuple[Any, bool]:
    told = person.join()
    is_open = dist.is_initialized() and dist.get_world_size() == world_size and dist.get_rank() == rank
    return tuple(told), is_open


def check_join(path: Path) -> None:
    try:
        answers = on_ranks(path, 4, _join, has_group=False, per_node=2)
    except Failed as failure:
        if failure.hint == "exception" and "EADDRINUSE" in failure.what:
            raise Failed(
                "everybody-is-rank-0",
                failure.what,
                "Rank 0 opens the meeting place at MASTER_PORT. Here a second process tried to open it too: each must "
                "join under its own rank.",
            ) from failure
        raise
    told = [answer[0] for answer in answers]
    what = f"on two nodes with two ranks each, join() returned {told}"
    if any(isinstance(value, str) for answer in told for value in answer):
        raise Failed(
            "text-not-numbers", what, "The environment holds text: '3' is not 3, and '10' < '9'. Make an int of it."
        )
    if [answer[2] for answer in told] == [0, 1, 2, 3]:
        raise Failed(
            "rank-is-not-local-rank",
            what,
            "The third number is the place on the node, LOCAL_RANK: 0, 1, 0, 1 here. With the global rank as device "
            "number, rank 2 would look for GPU 2 on a node that has two.",
        )
    if told != [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]:
        raise Failed("wrong-identity", what, "(rank, world size, local rank), each from its own variable.")
    if not all(is_open for _, is_open in answers):
        raise Failed("no-group", "after join() there is no group of four", "Call dist.init_process_group in join().")


def _average(person: ModuleType, rank: int, world_size: int) -> float:
    person.join()
    return float(person.average(float(rank + 1)))


def check_average(path: Path) -> None:
    for world_size, right in ((2, 1.5), (4, 2.5)):
        found = on_ranks(path, world_size, _average, has_group=False)
        if found == [right] * world_size:
            continue
        own = [float(rank + 1) for rank in range(world_size)]
        what = f"{world_size} ranks gave {own}; average() returned {found}, not {right} everywhere"
        if found == own:
            raise Failed("own-value-only", what, "Nothing was exchanged: each rank has only what it gave.")
        if found == [sum(own)] * world_size:
            raise Failed("missing-division", what, "That is the sum. Divide by the number of ranks.")
        if found[0] in (right, sum(own)):
            raise Failed(
                "only-rank-0-knows",
                what,
                "`reduce` brings the sum to one rank; the others hold half-finished values. `all_reduce` brings it "
                "to all.",
            )
        if world_size == 4 and found == [sum(own) / 2] * 4:
            raise Failed("hard-coded-world", what, "You divide by 2, but there are 4: ask dist.get_world_size().")
        raise Failed("wrong-average", what, "all_reduce adds up over ranks, in place; then divide, once.")


def _hear(person: ModuleType, rank: int, world_size: int) -> Any:
    person.join()
    return person.tell_everyone("folder-7" if rank == 0 else "")


def check_telling(path: Path) -> None:
    heard = on_ranks(path, 4, _hear, has_group=False)
    if heard != ["folder-7"] * 4:
        raise Failed(
            "not-told",
            f"rank 0 said 'folder-7'; the ranks heard {heard}",
            "broadcast_object_list(items, src=0) fills the list on every rank: return what is in it afterwards.",
        )


def _leave(person: ModuleType, rank: int, world_size: int) -> bool:
    person.join()
    person.leave()
    return dist.is_initialized()


def check_leaving(path: Path) -> None:
    if any(on_ranks(path, 2, _leave, has_group=False)):
        raise Failed(
            "group-left-open",
            "after leave() the group is still there",
            "dist.destroy_process_group() closes the connections. Without it a rank may leave while a peer still "
            "needs it, and the end of a good run looks like a failure.",
        )


ITEMS = (
    Item("four ranks on two nodes join and know who they are", check_join, ("join",)),
    Item("the average over 2 and over 4 ranks", check_average, ("join", "average")),
    Item("what the primary knows, all know", check_telling, ("join", "tell_everyone")),
    Item("the group is closed at the end", check_leaving, ("join", "leave")),
)
