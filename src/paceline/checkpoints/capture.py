"""Copies live training objects to named pieces in CPU memory, and back.

Names are the model's own parameter names, without a wrapper's prefix, so FSDP can load what DDP saved and the other way
round. There is no communication: each rank copies the slices it holds and restores the ones it needs.
"""

from __future__ import annotations

import base64
import json
import struct
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoints.payload import DTYPES, PayloadReader, Piece, local_box
from paceline.errors import CheckpointError, UserError
from paceline.parallel.buffers import transient_buffers
from paceline.parallel.parts import bits, copy_bits, is_sharded, local_part, new_tensor

_KEY = "_extra_state"  # torch's name for it in a state_dict
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError, struct.error)
Tensors = dict[str, Tensor]


# What a module's `get_extra_state` returns, as bytes and back: plain values and tensors, never a pickle.


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """By the name that their extra state has in `state_dict()`."""
    return {
        f"{prefix}.{_KEY}" if prefix else _KEY: module
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def encode_extra_state(value: Any, name: str) -> Tensor:
    """Bytes in a tensor. Raises UserError for what cannot be stored without a pickle."""
    try:
        text = json.dumps(_to_json(value)).encode()
    except TypeError as error:
        raise UserError(
            "a module's extra state cannot be saved",
            where=name,
            got=str(error),
            allowed="None, bool, int, float, str, bytes, list, tuple, dict, set and tensors",
        ) from error
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def decode_extra_state(data: Tensor, name: str) -> Any:
    try:
        return _from_json(json.loads(bytes(data.tolist())))
    except _MALFORMED as error:
        raise CheckpointError("a checkpoint's extra state cannot be read", where=name, got=str(error)[:80]) from error


def _to_json(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is list:
        return [_to_json(item) for item in value]
    if kind is float:
        return {"float": struct.pack("<d", value).hex()}  # every bit, also of NaN
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind in (tuple, set):
        return {kind.__name__: [_to_json(item) for item in value]}
    if kind in (dict, OrderedDict):
        return {kind.__name__: [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if isinstance(value, Tensor):
        flat = bits(value.detach().cpu()).contiguous().view(-1).view(torch.uint8)
        data = base64.b64encode(flat.numpy().tobytes()).decode()
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), data]}
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return struct.unpack("<d", bytes.fromhex(content))[0]
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "tuple":
        return tuple(_from_json(item) for item in content)
    if kind == "set":
        return {_from_json(item) for item in content}
    if kind in ("dict", "OrderedDict"):
        pairs = [(_from_json(key), _from_json(item)) for key, item in content]
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    if kind == "tensor":
        dtype, shape, data = content
        raw = bytearray(base64.b64decode(data, validate=True))
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return flat.view(DTYPES[dtype]).view(tuple(map(int, shape)))
    raise ValueError(f"a value of kind {kind!r}")


def model_tensors(model: nn.Module) -> Tensors:
    """Everything in the model's state: parameters, buffers, and the extra state of modules as bytes."""
    extra = modules_with_extra_state(model)
    return {
        name: encode_extra_state(value, name) if name in extra else value for name, value in model.state_dict().items()
    }


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Optimizer state by parameter name: `conv1.weight/momentum_buffer`."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    }


class Stage:
    """CPU memory that is reused from save to save, which avoids page faults.

    If saves are not asynchronous, tensors in CPU memory are written without a copy.
    """

    def __init__(self, *, is_async: bool) -> None:
        self._is_async = is_async
        self._buffers: Tensors = {}

    @torch.no_grad()
    def copy(self, kind: str, tensors: Tensors, *, sharded_only: bool) -> dict[str, Piece]:
        """Copies that training does not change. Of replicated tensors, one rank's copy is enough."""
        pieces = {}
        for name, tensor in tensors.items():
            if sharded_only and not is_sharded(tensor):
                continue
            values = local_part(tensor.detach())
            if self._is_async or values.device.type != "cpu":
                values = self._staged(f"{kind}/{name}", values)
            pieces[name] = Piece(values, local_box(tensor), tuple(tensor.shape))
        return pieces

    def _staged(self, key: str, values: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = new_tensor(values.shape, values.dtype, pin_memory=values.device.type == "cuda")
            self._buffers[key] = buffer
        bits(buffer).copy_(bits(values), non_blocking=True)
        return buffer


def restore_model(model: nn.Module, saved: PayloadReader) -> None:
    """Copy everything that `model_tensors` returned back into the model."""
    _copy_saved(require_same_model(model, saved), saved)
    for name, module in modules_with_extra_state(model).items():
        module.set_extra_state(decode_extra_state(saved.read(name), name))


def require_same_model(model: nn.Module, saved: PayloadReader) -> Tensors:
    """The tensors of a model, which may be on the meta device. KeyError unless the saved ones are the same."""
    extra = modules_with_extra_state(model)
    own = {name: value for name, value in model.state_dict().items() if name not in extra}
    missing = extra.keys() - saved.shapes.keys()
    if missing:
        raise KeyError(f"missing {sorted(missing)[:3]}")
    # Older versions saved buffers that are no part of the state.
    _require_same(own, saved, apart={*extra, *transient_buffers(model)})
    return own


def restore_tensors(own: Tensors, saved: PayloadReader) -> None:
    """Copy saved values into live tensors; names, shapes and types must match exactly."""
    _require_same(own, saved, apart=set())
    _copy_saved(own, saved)


def _require_same(own: Tensors, saved: PayloadReader, *, apart: set[str]) -> None:
    """Before anything is copied: a model is restored whole or not at all."""
    missing, unknown = own.keys() - saved.shapes.keys(), saved.shapes.keys() - own.keys() - apart
    if missing or unknown:
        raise KeyError(f"missing {sorted(missing)[:3]}, unexpected {sorted(unknown)[:3]}")
    for name, target in own.items():
        here, there = (tuple(target.shape), target.dtype), (saved.shapes[name], saved.dtypes[name])
        if here != there:
            raise KeyError(f"{name} is {there[0]} {there[1]}, the model has {here[0]} {here[1]}")


@torch.no_grad()
def _copy_saved(own: Tensors, saved: PayloadReader) -> None:
    for name, target in own.items():
        copy_bits(local_part(target.detach()), saved.read(name, local_box(target)))


@torch.no_grad()
def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, saved: PayloadReader) -> None:
    """Restore the state of an optimizer, where it would create its own."""
    keys: dict[str, list[str]] = {}
    for full_key in saved.shapes:
        owner, _, key = full_key.rpartition("/")
        keys.setdefault(owner, []).append(key)
    is_fused = bool(optimizer.param_groups[0].get("fused"))
    for name, parameter in model.named_parameters():
        state: dict[str, Any] = {}
        for key in keys.get(name, []):
            full_key = f"{name}/{key}"
            if key != "step" and saved.shapes[full_key] == tuple(parameter.shape):
                state[key] = torch.zeros_like(parameter, dtype=saved.dtypes[full_key], requires_grad=False)
                copy_bits(local_part(state[key]), saved.read(full_key, local_box(parameter)))
            else:
                # Scalars such as Adam's step count live on the CPU unless the optimizer is fused.
                state[key] = saved.read(full_key).to(parameter.device if is_fused else "cpu")
        if state:
            optimizer.state[parameter] = state
        else:  # a layer that no step had used by then; before a roll-back the optimizer may have used it
            optimizer.state.pop(parameter, None)


def gather_whole(tensors: Tensors, device: str) -> Tensors:
    """Every tensor in one piece on the CPU. Collective under FSDP."""
    whole = {}
    for name, tensor in tensors.items():
        value = tensor.detach()
        if is_sharded(value):
            value = value.to(device).full_tensor()  # type: ignore[attr-defined]
        whole[name] = new_tensor(value.shape, value.dtype)
        copy_bits(whole[name], value)
    return whole
