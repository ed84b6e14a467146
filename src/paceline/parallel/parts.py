"""Tensors that ranks hold whole, and those of which each holds a part.

Sharded ones are recognised without importing their class: that takes as long as importing half of torch, and where
nobody has imported it, there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element


def is_sharded(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of it: the whole, or its shard."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers. Torch copies them in every type it has, and no NaN changes on the way."""
    as_integers = _INTEGERS.get(tensor.element_size())
    plain = tensor.resolve_conj().resolve_neg()
    return plain if as_integers is None or plain.dtype == as_integers else plain.view(as_integers)


def new_tensor(shape: Sequence[int], dtype: torch.dtype, *, pin_memory: bool = False) -> Tensor:
    """CPU memory for a tensor of any type. Under --exact torch fills new memory, which it cannot do for every type."""
    as_integers = _INTEGERS.get(dtype.itemsize, dtype)
    return torch.empty(tuple(shape), dtype=as_integers, pin_memory=pin_memory).view(dtype)


def copy_bits(target: Tensor, source: Tensor) -> None:
    """Copy a tensor of the same type and shape, bit for bit."""
    if target.dtype != source.dtype or target.shape != source.shape:
        raise TypeError(f"{source.dtype} {tuple(source.shape)} does not fit {target.dtype} {tuple(target.shape)}")
    for dimension, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:  # expanded: all rows are one row in memory, and torch refuses to write it twice
            target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    bits(target).copy_(bits(source))
