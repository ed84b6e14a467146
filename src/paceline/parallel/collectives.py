"""Collectives for everything other than gradients. Each is a no-op on one rank.

Texts are sent as bytes, never as pickles.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.runtime.detect import World


def sum_over_ranks(values: Tensor, world: World) -> Tensor:
    """Add a tensor up over all ranks, in place."""
    if world.world_size > 1:
        dist.all_reduce(values)
    return values


def broadcast_text(text: str, world: World) -> str:
    """The primary's text on every rank."""
    if world.world_size == 1:
        return text
    return gather_texts(text if world.is_primary else "", world)[0]


def gather_texts(text: str, world: World) -> list[str]:
    """Every rank's text on every rank, by rank."""
    if world.world_size == 1:
        return [text]
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=world.device)
    lengths = torch.zeros(world.world_size, dtype=torch.int64, device=world.device)
    lengths[world.rank] = len(data)
    dist.all_reduce(lengths)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=world.device)
    padded[: len(data)] = data
    everyone = [torch.empty_like(padded) for _ in range(world.world_size)]
    dist.all_gather(everyone, padded)
    sizes = lengths.tolist()
    return [bytes(part[:size].tolist()).decode() for part, size in zip(everyone, sizes, strict=True)]


def is_true_on_any(flag: bool, world: World) -> bool:
    """Whether the flag is set on at least one rank. Uses CPU memory and does not wait for a GPU."""
    if world.world_size == 1:
        return flag
    return bool(sum_over_ranks(torch.tensor([int(flag)]), world).item())


def wait_for_all(world: World) -> None:
    """A barrier over all ranks."""
    if world.world_size > 1:
        sum_over_ranks(torch.zeros(1, device=world.device), world).item()


def gather_rows(row: Tensor, world: World) -> Tensor:
    """Every rank's tensor, stacked by rank, on every rank."""
    everyone = [torch.empty_like(row) for _ in range(world.world_size)]
    dist.all_gather(everyone, row.contiguous())
    return torch.stack(everyone)


def tree_sum(rows: Tensor) -> Tensor:
    """Add up the rows of a tensor in a fixed binary tree: adjacent pairs first, then adjacent pairs of their sums."""
    while len(rows) > 1:
        pairs = rows[0 : len(rows) - len(rows) % 2]
        rest = rows[len(pairs) :]
        rows = torch.cat([pairs[0::2] + pairs[1::2], rest])
    return rows[0]


def gather_lanes(rows: Tensor, world: World) -> Tensor:
    """The concatenated rows of all ranks, in the order of ranks, on every rank."""
    return gather_rows(rows, world).flatten(0, 1) if world.world_size > 1 else rows


def sum_lanes(rows: Tensor, world: World) -> Tensor:
    """Add up every rank's rows, in the order of ranks, in one fixed tree: the same bits on every rank."""
    return tree_sum(gather_lanes(rows, world))
