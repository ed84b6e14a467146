"""The few ways ranks talk to each other outside of gradients. Each is a no-op on one rank.

Texts travel as bytes, never as pickles.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.world.detect import World


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


def wait_for_all(world: World) -> None:
    """No rank goes on before every rank is here."""
    if world.world_size > 1:
        sum_over_ranks(torch.zeros(1, device=world.device), world).item()


@torch.no_grad()
def average_buffers(model: nn.Module, world: World) -> None:
    """Give every rank the mean of all ranks' running statistics.

    BatchNorm's running mean and variance are moving averages, and averaging is linear: doing it once
    before an evaluation gives what doing it after every step would have given.
    """
    if world.world_size == 1:
        return
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([buffer.reshape(-1).float() for buffer in buffers])
    sum_over_ranks(flat, world).div_(world.world_size)
    start = 0
    for buffer in buffers:
        buffer.copy_(flat[start : start + buffer.numel()].view_as(buffer))
        start += buffer.numel()
