"""What a module's `get_extra_state` returns, as bytes and back: plain values and tensors, never a pickle."""

from __future__ import annotations

import base64
import json
import struct
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoints.payload import DTYPES
from paceline.errors import CheckpointError, UserError
from paceline.parallel.parts import bits

_KEY = "_extra_state"  # torch's name for it in a state_dict
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError, struct.error)


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
