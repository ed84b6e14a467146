"""Samples of users as tensors: the layouts and types that are accepted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.data.labels import refuse_masked
from paceline.errors import UserError

EXPECTED_SAMPLE = (
    "uint8 or float images [N, C, H, W], [N, H, W, C] (1 or 3 channels) or [N, H, W], or float vectors [N, D]"
)
_COLOURS = (1, 3)  # numbers of channels that are recognised in the last place


def as_tensor(values: Any) -> Tensor:
    is_tensor = isinstance(values, Tensor)
    if hasattr(values, "toarray") or (is_tensor and values.layout != torch.strided):  # scipy's, or torch's
        hint = f"x.{'to_dense' if is_tensor else 'toarray'}()"
        raise UserError("sparse samples are not supported", got=kind_of(values), allowed=EXPECTED_SAMPLE, hint=hint)
    if isinstance(values, Tensor):
        return values.detach()
    refuse_masked(values)
    try:
        array = np.asarray(values)
        # torch warns about arrays that cannot be written, and has no negative strides.
        is_usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
        return torch.from_numpy(array if is_usable else array.copy())
    except TypeError as error:
        raise UserError("this is not an array of numbers", got=kind_of(values), allowed=EXPECTED_SAMPLE) from error
    except ValueError as error:  # numpy cannot stack them
        raise UserError(
            "these samples differ in shape", got=kind_of(values), allowed=EXPECTED_SAMPLE, hint="resize the samples"
        ) from error


def as_samples(batch: Any) -> Tensor:
    """uint8 or float32 images [B, C, H, W], or float32 vectors [B, D], from the usual layouts."""
    tensor = as_tensor(batch).cpu()
    is_float = tensor.dtype.is_floating_point
    is_image = tensor.ndim in (3, 4) and (is_float or tensor.dtype == torch.uint8)
    is_empty = math.prod(tensor.shape[1:]) == 0
    if is_empty or not (is_image or (is_float and tensor.ndim == 2)):
        raise UserError(
            "samples of this kind cannot be trained on",
            got=f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape[1:])} per sample",
            allowed=EXPECTED_SAMPLE,
            hint=_hint_for(tensor),
        )
    if is_float:
        tensor = tensor.to(torch.float32)
    if tensor.ndim == 3:
        return tensor[:, None]
    if tensor.ndim == 4 and tensor.shape[1] not in _COLOURS and tensor.shape[3] in _COLOURS:
        return tensor.permute(0, 3, 1, 2).contiguous()
    return tensor


def _hint_for(tensor: Tensor) -> str | None:
    if tensor.ndim not in (2, 3, 4) or tensor.dtype.is_complex:
        return None
    if tensor.dtype == torch.uint8:
        return "x.astype('float32') for vectors, or images [N, H, W]"
    return (
        None if tensor.dtype.is_floating_point else "x.astype('uint8') for values from 0 to 255, or x.astype('float32')"
    )


def kind_of(value: Any) -> str:
    if isinstance(value, np.ndarray | Tensor):
        return f"an array of {str(value.dtype).removeprefix('torch.')}, shape {tuple(value.shape)}"
    try:
        return f"a {type(value).__name__} of length {len(value)}"
    except TypeError:  # it has none
        return f"a {type(value).__name__}"
