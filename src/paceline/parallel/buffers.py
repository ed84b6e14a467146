"""A model's buffers on several ranks: running statistics are averaged, all other buffers are per rank.

The type of the module decides which buffer is a running statistic, not the dtype: the mean of masks, tables or
counters over ranks has no meaning.
"""

from __future__ import annotations

import json
import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # base class of BatchNorm, SyncBatchNorm and InstanceNorm

from paceline.parallel.collectives import gather_rows, gather_texts, tree_sum
from paceline.parallel.parts import bits, copy_bits
from paceline.runtime.detect import World

_STATISTICS = ("running_mean", "running_var")
Tensors = dict[str, Tensor]


@torch.no_grad()
def begin_alike(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to every rank: a user's own model may start differently. Collective.

    They are sent as bytes, because gloo and NCCL do not support all types.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        values = _bytes(tensor).clone()
        dist.broadcast(values, 0)
        copy_bits(tensor.detach(), values.view(tensor.dtype).view(tensor.shape))


def running_statistics(model: nn.Module) -> Tensors:
    """The moving averages of normalisation layers, by name."""
    return {
        name: buffer
        for name, (module, key, buffer) in _buffers(model).items()
        if isinstance(module, _NormBase) and key in _STATISTICS
    }


def transient_buffers(model: nn.Module) -> set[str]:
    """Names of buffers that are not part of the model's state."""
    return {name for name, (module, key, _) in _buffers(model).items() if key in module._non_persistent_buffers_set}


def _buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    return {
        f"{prefix}.{key}" if prefix else key: (module, key, buffer)
        for prefix, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


@torch.no_grad()
def gather_own_buffers(model: nn.Module, world: World) -> Tensors:
    """Running statistics, and buffers of the model's state that differ between ranks.

    By name, with one row per rank, bit for bit. Empty on one rank. Collective.
    """
    if world.world_size == 1:
        return {}
    statistics, transient = running_statistics(model), transient_buffers(model)
    others = {
        name: buffer
        for name, (module, _, buffer) in _buffers(model).items()
        if name not in statistics and name not in transient and not isinstance(module, _NormBase)
    }
    return _gather(statistics | _those_that_differ(others, world), world)


def average_rows(rows: Tensor) -> Tensor:
    """The mean of the ranks' rows of a statistic. Divides first: the sum of large values may overflow."""
    return tree_sum(rows.double() / len(rows)).to(rows.dtype)


@torch.no_grad()
def average_statistics(model: nn.Module, world: World) -> None:
    """Give every rank the mean of all ranks' running statistics. Collective.

    BatchNorm's running mean and variance are moving averages, and averaging is linear. Averaging once before an
    evaluation gives the same result as averaging after every step.
    """
    statistics = running_statistics(model)
    if world.world_size > 1 and statistics:
        for name, rows in _gather(statistics, world).items():
            copy_bits(statistics[name], average_rows(rows))


@torch.no_grad()
def set_own_buffers(model: nn.Module, rows: Tensors, world: World) -> None:
    """Give this rank its row of the result of `gather_own_buffers`, made with the same number of ranks."""
    live = _buffers(model)
    for name, values in rows.items():
        if name in live and len(values) == world.world_size:
            copy_bits(live[name][2], values[world.rank])


def _those_that_differ(buffers: Tensors, world: World) -> Tensors:
    """Most buffers (tables, masks) are equal on all ranks. Ranks compare checksums, which sends fewer bytes."""
    if not buffers:
        return {}
    sums = [zlib.crc32(_bytes(buffer).cpu().numpy().data) for buffer in buffers.values()]
    everyone = [json.loads(text) for text in gather_texts(json.dumps(sums), world)]
    differ = [len(set(column)) > 1 for column in zip(*everyone, strict=True)]
    return {name: buffer for (name, buffer), is_own in zip(buffers.items(), differ, strict=True) if is_own}


def _gather(tensors: Tensors, world: World) -> Tensors:
    """Every rank's tensors, stacked by rank. They are sent as bytes, in one message."""
    if not tensors:
        return {}
    table = gather_rows(torch.cat([_bytes(tensor).to(world.device) for tensor in tensors.values()]), world)
    rows, position = {}, 0
    for name, tensor in tensors.items():
        part = table[:, position : position + tensor.nbytes].clone()  # the clone is aligned for its type
        rows[name] = part.view(tensor.dtype).view(world.world_size, *tensor.shape)
        position += tensor.nbytes
    return rows


def _bytes(tensor: Tensor) -> Tensor:
    return bits(tensor.detach()).reshape(-1).view(torch.uint8)
