"""Lesson 2: join a process group, know the own rank, reduce, broadcast, leave."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from paceline.tools.course.graders import hang
from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item, cause_not_known


def _join(person: ModuleType, rank: int, world_size: int) -> tuple[Any, bool]:
    returned = person.join()
    is_open = dist.is_initialized() and dist.get_world_size() == world_size and dist.get_rank() == rank
    return tuple(returned), is_open


def check_join(path: Path) -> None:
    try:
        answers = on_ranks(path, 4, _join, has_group=False, per_node=2)
    except Failed as failure:
        if failure.hint == "exception" and "EADDRINUSE" in failure.what:
            raise Failed(
                "all-join-as-rank-0",
                failure.what,
                "Rank 0 listens at MASTER_PORT. Here a second process tried to listen there too. Each process must "
                "join with its own rank.",
            ) from failure
        raise
    found = [answer[0] for answer in answers]
    what = f"on two nodes with two ranks each, join() returned {found}"
    if any(isinstance(value, str) for answer in found for value in answer):
        raise Failed(
            "text-not-numbers",
            what,
            "Environment variables are text: '3' is not 3, and '10' < '9'. Convert them with int().",
        )
    if [answer[2] for answer in found] == [0, 1, 2, 3]:
        raise Failed(
            "rank-is-not-local-rank",
            what,
            "The third number is LOCAL_RANK, the number on the node: 0, 1, 0, 1 here. With the global rank as device "
            "number, rank 2 would ask for GPU 2 on a node that has GPUs 0 and 1.",
        )
    if found != [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)]:
        raise cause_not_known(what, "(rank, world size, local rank), each from its own environment variable.")
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
        if found in (own, [value / world_size for value in own]):
            raise Failed("own-value-only", what, "Nothing was exchanged. dist.all_reduce adds up over ranks.")
        if found == [sum(own)] * world_size:
            raise Failed("missing-division", what, "That is the sum. Divide by the number of ranks.")
        if found[0] in (right, sum(own)):
            raise Failed(
                "only-rank-0-knows",
                what,
                "`reduce` sends the sum to one rank, and the others hold partial sums. `all_reduce` sends it to all.",
            )
        if world_size == 4 and found == [sum(own) / 2] * 4:
            raise Failed("hard-coded-world", what, "You divide by 2, but there are 4 ranks. Use dist.get_world_size().")
        raise cause_not_known(
            what, "all_reduce adds up over ranks, in place. Then divide once, by the number of ranks."
        )


def _broadcast(person: ModuleType, rank: int, world_size: int) -> Any:
    person.join()
    return person.tell_everyone("folder-7" if rank == 0 else "")


def check_broadcast(path: Path) -> None:
    received = on_ranks(path, 4, _broadcast, has_group=False)
    if received == ["folder-7"] * 4:
        return
    what = f"rank 0 has 'folder-7'; the ranks returned {received}"
    if received == ["folder-7", "", "", ""]:
        raise Failed(
            "not-broadcast",
            what,
            "Nothing was sent. broadcast_object_list(items, src=0) fills the list on every rank; return items[0] after "
            "it.",
        )
    if received == [""] * 4:
        raise Failed("wrong-source", what, "The text came from a rank that does not have it. src is the sender: 0.")
    raise cause_not_known(what, "broadcast_object_list(items, src=0) fills the list on every rank; return items[0].")


def _leave(person: ModuleType, rank: int, world_size: int) -> bool:
    person.join()
    dist.barrier()  # a rank that leaves would break the connections of one that still joins
    person.leave()
    return dist.is_initialized()


def check_leaving(path: Path) -> None:
    if any(on_ranks(path, 2, _leave, has_group=False)):
        raise Failed(
            "group-left-open",
            "after leave() the group is still open",
            "dist.destroy_process_group() closes the connections. Without it a rank may exit while another still "
            "needs it, and the end of a good run looks like a failure.",
        )


ITEMS = (
    Item("four ranks on two nodes join and know their ranks", check_join, ("join",)),
    Item("the average over 2 and over 4 ranks", check_average, ("join", "average")),
    Item("a text of rank 0 reaches all ranks", check_broadcast, ("join", "tell_everyone")),
    Item("the group is closed at the end", check_leaving, ("join", "leave")),
    *hang.ITEMS,
)
