"""Activation checkpointing: a block keeps its input, and computes its activations again in the backward pass.

The bits do not change: dropout is drawn again from the same keys (models/dropout.py) or from the same state of torch's
generators, and running statistics are updated in the first pass only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from paceline.errors import UserError
from paceline.models.layers import find_blocks


def recompute_blocks(model: nn.Module, *, draws_from_torch: bool) -> None:
    """Change the model's blocks. `draws_from_torch`: they may use torch's generators, whose state is then kept."""
    for block in require_blocks(model):
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws_from_torch}
        norms = [norm for norm in block.modules() if isinstance(norm, _NormBase) and norm.running_mean is not None]
        if norms:
            options["context_fn"] = partial(_contexts, norms)
        block.forward = partial(_forward, block, block.forward, options)


def require_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model. UserError if it has none."""
    blocks = list(find_blocks(nn.ModuleList([model])))
    if not blocks:
        raise UserError(
            "activation_checkpointing needs a model with blocks",
            where="--activation-checkpointing",
            got="no nn.Sequential or nn.ModuleList of blocks in this model",
            hint="put the blocks into an nn.Sequential, or leave --activation-checkpointing out",
        )
    return blocks


def _forward(block: nn.Module, plain_forward: Any, options: dict[str, Any], *inputs: Any, **named: Any) -> Any:
    if not block.training or not torch.is_grad_enabled():
        return plain_forward(*inputs, **named)
    return checkpoint(plain_forward, *inputs, **options, **named)


def _contexts(norms: list[_NormBase]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of the first pass, and of the second."""
    return nullcontext(), _keep_statistics(norms)


@contextmanager
def _keep_statistics(norms: list[_NormBase]) -> Iterator[None]:
    """Let norms update copies. The statistics themselves stay untouched: autograd refuses tensors that were changed."""
    before = [dict(norm._buffers) for norm in norms]
    for norm, buffers in zip(norms, before, strict=True):
        norm._buffers.update({name: None if value is None else value.clone() for name, value in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)
