"""What this machine can do at best: copying memory, and the links between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.bench.links import Limit, gpu_link, network_link
from paceline.metrics.timing import repeat
from paceline.world.detect import World

_COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}  # beyond any cache
_COPY_S = 0.4


@dataclass(frozen=True)
class MachineLimits:
    """Of one rank, while all ranks are at it."""

    copy_bytes_per_s: float
    link: Limit | None  # None where nothing is exchanged


def measure_copy_bandwidth(device: str) -> float:
    """Bytes per second from one place in the device's memory to another."""
    kind = torch.device(device).type
    source = torch.ones(_COPY_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rounds = repeat(lambda: target.copy_(source), device, _COPY_S)
    return source.nbytes / rounds.median_s


def find_link(world: World, copy_bytes_per_s: float) -> Limit | None:
    """What bounds the exchange between these ranks, as far as anything here knows."""
    if world.world_size == 1:
        return None
    if world.num_nodes > 1:
        return network_link(is_nccl=world.backend == "nccl")
    if world.backend == "nccl":
        return gpu_link(torch.cuda.current_device())
    ranks = f"{world.world_size} ranks at once"
    return Limit(copy_bytes_per_s, f"memory copy on this machine, {ranks}, measured in this run", is_measured=True)
