"""Helpers for plain tensors and for sharded tensors (DTensor), of which each rank holds a part.

Sharded tensors are recognised without importing their class. The import takes as long as half of torch, and
without it there are no sharded tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size in bytes


def is_sharded(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds: the whole tensor, or its shard."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def sum_over_shards(values: Tensor, tensor: Tensor) -> None:
    """Add up values of this rank's shard of a tensor over the ranks that hold its other shards, in place. Collective.

    Under hsdp they are the ranks of one node: other nodes hold copies.
    """
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    dist.all_reduce(values, group=mesh.get_group(mesh.ndim - 1))


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers. torch can copy integers for every type, and NaN bits do not change."""
    as_integers = _INTEGERS.get(tensor.element_size())
    plain = tensor.resolve_conj().resolve_neg()
    return plain if as_integers is None or plain.dtype == as_integers else plain.view(as_integers)


def new_tensor(shape: Sequence[int], dtype: torch.dtype, *, pin_memory: bool = False) -> Tensor:
    """An uninitialised CPU tensor of any type. Under --exact torch fills new memory, but not for every type."""
    as_integers = _INTEGERS.get(dtype.itemsize, dtype)
    return torch.empty(tuple(shape), dtype=as_integers, pin_memory=pin_memory).view(dtype)


def copy_bits(target: Tensor, source: Tensor) -> None:
    """Copy a tensor of the same type and shape, bit for bit."""
    if target.dtype != source.dtype or target.shape != source.shape:
        raise TypeError(f"{source.dtype} {tuple(source.shape)} does not fit {target.dtype} {tuple(target.shape)}")
    for dimension, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:  # expanded: all rows are the same memory, which torch refuses to write
            target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    bits(target).copy_(bits(source))
