"""FSDP2: a model cut into shards, one group per block, and its exchanges counted and timed.

Imported only by runs that shard: torch's machinery for it takes as long to load as half of torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from paceline.parallel.exposed import Exposed
from paceline.world.detect import World


def shard(model: nn.Module, world: World, dtype: torch.dtype | None, *, offload: bool) -> nn.Module:
    """One group of shards per block, and one for what lies between blocks."""
    options: dict[str, Any] = {
        # Named, because FSDP would take the GPUs of a machine that has some even for a run on its CPUs.
        "mesh": init_device_mesh(torch.device(world.device).type, (world.world_size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for block in find_blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts of a model: children of its sequences, not cut any further."""
    for child in model.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            for part in child.children():
                if isinstance(part, nn.Sequential | nn.ModuleList):
                    yield from find_blocks(nn.ModuleList([part]))
                elif any(True for _ in part.parameters()):
                    yield part
        else:
            yield from find_blocks(child)


def follow_shards(model: nn.Module, exposed: Exposed, device: torch.device) -> None:
    """Count and, on CPUs, time every exchange of a sharded model."""
    exposed.is_known = device.type != "cuda"
    gather, scatter = _TimedAllGather(exposed), _TimedReduceScatter(exposed)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)


class _TimedAllGather(DefaultAllGather):
    def __init__(self, exposed: Exposed) -> None:
        self._exposed = exposed

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        work = super().__call__(output_tensor, input_tensor, *args, **kwargs)
        self._exposed.exchanged(began, output_tensor.nbytes - input_tensor.nbytes)
        return work


class _TimedReduceScatter(DefaultReduceScatter):
    def __init__(self, exposed: Exposed) -> None:
        self._exposed = exposed

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        work = super().__call__(output_tensor, input_tensor, *args, **kwargs)
        self._exposed.exchanged(began, input_tensor.nbytes - output_tensor.nbytes)
        return work
