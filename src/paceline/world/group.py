"""The process group: opened for the length of a run, closed however the run ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.world.detect import World

START_TIMEOUT = timedelta(minutes=10)


@contextmanager
def process_group(world: World, *, needed: bool) -> Iterator[None]:
    """Join the other ranks. A lone process joins a group of one only where a strategy needs it."""
    if not needed and world.world_size == 1:
        yield
        return
    device = torch.device(world.device)
    # Beside nccl, gloo for what lies in CPU memory: offloaded shards, for one.
    backend = "cpu:gloo,cuda:nccl" if world.backend == "nccl" else world.backend
    if world.world_size == 1:
        # A store in memory: no port is opened for a group of one.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=START_TIMEOUT)
    else:
        dist.init_process_group(backend, timeout=START_TIMEOUT, device_id=device if device.type == "cuda" else None)
    try:
        yield
    finally:
        # No barrier here: after an exception on one rank it would turn a crash into a hang.
        dist.destroy_process_group()
