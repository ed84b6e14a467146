"""Lesson 2: process groups and ranks. Fill the gaps, then: paceline course check 2

The check starts this file on four processes and sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for
each of them, as torchrun does.
"""

import os

import torch
import torch.distributed as dist


def join() -> tuple[int, int, int]:
    """Open the process group with the gloo backend; returns (rank, world size, local rank) as numbers."""
    ...  # TODO: open the group; torch reads the five variables
    rank = ...  # TODO: the number of this process among all
    world_size = ...  # TODO: the number of processes
    local_rank = ...  # TODO: the number of this process on its node
    return rank, world_size, local_rank


def average(value: float) -> float:
    """The average of all ranks' values, on every rank."""
    total = torch.tensor(value, dtype=torch.float64)
    ...  # TODO: sum over ranks, divide, return a float


def tell_everyone(text: str) -> str:
    """Only rank 0 gets a text (for example a folder's name); every rank returns it."""
    items = [text]
    ...  # TODO: send rank 0's list to all ranks (broadcast_object_list)
    return items[0]


def leave() -> None:
    """Close the group."""
    ...  # TODO


# --- Diagnose a hang --------------------------------------------------------------------------------------------------
#
# any_rank_wants_to_stop has no gap, but it hangs on some inputs. Four ranks call it, and ranks 1 and 3 want to stop.

WAITING_RANKS = ...  # TODO: the ranks that wait forever, as a set
CAUSE = ...  # TODO: "skipped collective", "different collectives", "different order" or "no process group"


def any_rank_wants_to_stop(wants_to_stop: bool) -> bool:
    """Whether at least one rank wants to stop: the same answer on every rank. TODO: repair it."""
    if wants_to_stop:
        return True
    flag = torch.tensor(0)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
