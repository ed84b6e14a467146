"""2x2 max-pooling: torch's own, or, in models compiled for a GPU, two small kernels that are faster with the same bits.

In the backward pass, code from torch's compiler computes the window of every pixel again. A GPU spends more time on
these divisions than on moving the pixels: a seventh of a step of `sprint`. (docs/decisions/0017)
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_HAS_KERNELS = importlib.util.find_spec("triton") is not None  # installed with the GPU builds of torch


class MaxPool2x2(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return max_pool_2x2(x)


def max_pool_2x2(x: Tensor) -> Tensor:
    """F.max_pool2d(x, 2)."""
    if torch.compiler.is_compiling() and _suits_kernels(x):
        values: Tensor = torch.ops.paceline.max_pool_2x2(x)[0]
        return values
    return F.max_pool2d(x, 2)


def _suits_kernels(x: Tensor) -> bool:
    in_training = x.is_cuda and x.requires_grad
    return _HAS_KERNELS and in_training and x.is_contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("paceline::max_pool_2x2", mutates_args=(), schema="(Tensor x) -> (Tensor, Tensor)")
def _pool(x: Tensor) -> tuple[Tensor, Tensor]:
    from paceline.models.pooling_kernels import launch_forward

    values, places = _allocate(x)
    launch_forward(x, values, places)
    return values, places


@_pool.register_fake
def _allocate(x: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the largest values, and for the number (of four) of the pixel that held each."""
    size = (*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2)
    values = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return values, torch.empty_like(values, dtype=torch.int8)


@torch.library.custom_op(
    "paceline::max_unpool_2x2",
    mutates_args=(),
    schema="(Tensor gradient, Tensor places, SymInt height, SymInt width) -> Tensor",
)
def _unpool(gradient: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    from paceline.models.pooling_kernels import launch_backward

    result: Tensor = _allocate_back(gradient, places, height, width)
    launch_backward(gradient.contiguous(memory_format=torch.channels_last), places, result)
    return result


@_unpool.register_fake
def _allocate_back(gradient: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    size = (*gradient.shape[:2], height, width)
    return torch.empty(size, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)


def _remember(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.size = tuple(inputs[0].shape[2:])  # type: ignore[attr-defined]
    ctx.mark_non_differentiable(output[1])


def _go_back(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, _: None) -> Tensor:
    (places,) = ctx.saved_tensors  # type: ignore[attr-defined]
    result: Tensor = torch.ops.paceline.max_unpool_2x2(gradient, places, *ctx.size)  # type: ignore[attr-defined]
    return result


_pool.register_autograd(_go_back, setup_context=_remember)
