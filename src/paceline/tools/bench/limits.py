"""The limits of this machine: memory copies, and the links between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.metrics.timing import repeat
from paceline.runtime.detect import World
from paceline.tools.bench.links import Limit, gpu_link, network_link

_COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}  # larger than any cache
_COPY_S = 0.4


@dataclass(frozen=True)
class MachineLimits:
    """The limits of one rank while all ranks measure."""

    copy_bytes_per_s: float
    link: Limit | None  # None if nothing is exchanged


def measure_copy_bandwidth(device: str) -> float:
    """Bytes per second of a copy within the device's memory."""
    kind = torch.device(device).type
    source = torch.ones(_COPY_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rounds = repeat(lambda: target.copy_(source), device, _COPY_S)
    return source.nbytes / rounds.median_s


def find_link(world: World, copy_bytes_per_s: float) -> Limit | None:
    """The limit of the exchange between these ranks, if it is known."""
    if world.world_size == 1:
        return None
    if world.num_nodes > 1:
        return network_link(is_nccl=world.backend == "nccl")
    if world.backend == "nccl":
        return gpu_link(torch.cuda.current_device())
    ranks = f"{world.world_size} ranks at once"
    return Limit(copy_bytes_per_s, f"memory copy on this machine, {ranks}, measured in this run", is_measured=True)
