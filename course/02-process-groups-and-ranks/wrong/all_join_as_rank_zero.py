# hint: all-join-as-rank-0
# All processes have rank 0.
"""Lesson 2: process groups and ranks. Fill the gaps, then: paceline course check 2

The check starts this file on four processes and sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for
each of them, as torchrun does.
"""

import os

import torch
import torch.distributed as dist


def join() -> tuple[int, int, int]:
    """Open the process group with the gloo backend; returns (rank, world size, local rank) as numbers."""
    dist.init_process_group("gloo", rank=0, world_size=int(os.environ["WORLD_SIZE"]))
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
    dist.broadcast_object_list(items, src=0)
    return items[0]


def leave() -> None:
    """Close the group."""
    dist.destroy_process_group()
