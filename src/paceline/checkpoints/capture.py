"""Between live training objects and named tensors on the CPU.

Names are the model's own parameter names, never a wrapper's, so what DDP saved FSDP can load and the
other way round. Under FSDP gathering is collective: every rank must take part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Tensors = dict[str, Tensor]


def whole(value: Tensor, device: str) -> Tensor:
    """A tensor in one piece in CPU memory, as a copy that training will not change."""
    value = value.detach()
    if isinstance(value, DTensor):
        value = value.to(device).full_tensor()  # type: ignore[attr-defined]
    return value.to("cpu", copy=True).contiguous()


def capture_model(model: nn.Module, device: str) -> Tensors:
    return {name: whole(value, device) for name, value in model.state_dict().items()}


@torch.no_grad()
def restore_tensors(own: Tensors, tensors: Tensors) -> None:
    """Copy saved values into live tensors; the names must match exactly."""
    missing, extra = own.keys() - tensors.keys(), tensors.keys() - own.keys()
    if missing or extra:
        raise KeyError(f"missing {sorted(missing)[:3]}, unexpected {sorted(extra)[:3]}")
    for name, target in own.items():
        if target.shape != tensors[name].shape:
            raise KeyError(f"{name} is {tuple(tensors[name].shape)}, the model has {tuple(target.shape)}")
        target.copy_(_like(target, tensors[name]))


def capture_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Tensors:
    """Optimizer state by parameter name: `conv1.weight/momentum_buffer`."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = whole(value, device)
    return tensors


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    for name, parameter in model.named_parameters():
        state: dict[str, Any] = {}
        for full_key, value in tensors.items():
            owner, _, key = full_key.rpartition("/")
            if owner == name:
                # Scalars such as Adam's step count live on the CPU unless the optimizer is fused.
                scalar_device = parameter.device if _is_fused(optimizer) else value.device
                state[key] = (
                    _like(parameter, value) if value.shape == parameter.shape else value.to(scalar_device)
                )
        if state:
            optimizer.state[parameter] = state


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.param_groups[0].get("fused"))


def _like(target: Tensor, value: Tensor) -> Tensor:
    """A saved value in the target's placement, type and layout."""
    if isinstance(target, DTensor):
        # Every rank has the whole value, so each cuts out its own shard: nothing is sent.
        moved = value.to(target.device, target.dtype)
        return distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None)
    return torch.empty_like(target, requires_grad=False).copy_(value)
