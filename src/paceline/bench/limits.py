"""What this machine can do at best: copying memory, multiplying matrices, and the links between ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from paceline.bench.links import Limit, gpu_link, network_link
from paceline.bench.timing import Rounds, Work, synchronise, time_rounds
from paceline.world.detect import World

_COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}  # beyond any cache
_COPY_S, _MATMUL_S = 0.4, 0.6
_FIRST_SIDE, _LAST_SIDE = 256, 16384
_LONG_ENOUGH_S = {"cpu": 0.02, "cuda": 0.004}  # for a matrix product to be at its best


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
    rounds = _repeat(lambda: target.copy_(source), device, _COPY_S)
    return source.nbytes / rounds.median_s


def measure_matmul_flops(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large product of square matrices, at its best."""
    kind = torch.device(device).type
    side, best_s, is_last = _FIRST_SIDE, 0.0, False
    with _tf32_on_gpus(kind):
        while not is_last:
            # Twice the side is eight times the work.
            is_last = 8 * best_s >= _LONG_ENOUGH_S[kind] or 2 * side > _LAST_SIDE
            # Random: a GPU multiplies ones faster than numbers, because it takes less power.
            left, right, out = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
            product = partial(torch.matmul, left, right, out=out)
            best_s = min(_repeat(product, device, _MATMUL_S if is_last else 0.0).seconds)
            rate = 2 * side**3 / best_s
            side *= 2
    return rate


@contextmanager
def _tf32_on_gpus(kind: str) -> Iterator[None]:
    """Convolutions in float32 may use TF32 there: the ceiling must not be lower than the work."""
    if kind != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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


def _repeat(work: Work, device: str, seconds: float) -> Rounds:
    """Two rounds to warm up, then as many as fit."""
    time_rounds(work, device, 2)
    synchronise(device)
    started = time.perf_counter()
    first = time_rounds(work, device, 1)
    once = max(time.perf_counter() - started, 1e-9)
    rest = time_rounds(work, device, max(2, min(200, round(seconds / once))))
    return Rounds(first.seconds + rest.seconds)
