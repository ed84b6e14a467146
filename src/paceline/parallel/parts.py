"""Tensors that ranks hold whole, and those of which each holds a part.

Sharded ones are recognised without importing their class: that takes as long as importing half of torch, and where
nobody has imported it, there are none.
"""

from __future__ import annotations

import sys

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of it: the whole, or its shard."""
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part
