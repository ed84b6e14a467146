# hint: wrong-source
# Rank 1 does not have the text.
"""Lesson 2: process groups and ranks. Fill the gaps, then: paceline course check 2

The check starts this file on four processes and sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for
each of them, as torchrun does.
"""

import os

import torch
import torch.distributed as dist


def join() -> tuple[int, int, int]:
    """Open the process group with the gloo backend; returns (rank, world size, local rank) as numbers."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    return rank, world_size, local_rank


def average(value: float) -> float:
    """The average of all ranks' values, on every rank."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def tell_everyone(text: str) -> str:
    """Only rank 0 gets a text (for example a folder's name); every rank returns it."""
    items = [text]
    dist.broadcast_object_list(items, src=1)
    return items[0]


def leave() -> None:
    """Close the group."""
    dist.destroy_process_group()


# --- Diagnose a hang --------------------------------------------------------------------------------------------------
#
# any_rank_wants_to_stop has no gap, but it hangs on some inputs. Four ranks call it, and ranks 1 and 3 want to stop.

WAITING_RANKS = {0, 2}  # the ranks that wait forever, as a set
CAUSE = "skipped collective"  # "skipped collective", "different collectives", "different order" or "no process group"


def any_rank_wants_to_stop(wants_to_stop: bool) -> bool:
    """Whether at least one rank wants to stop: the same answer on every rank."""
    flag = torch.tensor(int(wants_to_stop))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
