"""Predicts the memory of a rank: a training step on the meta device, of which every live tensor is counted.

The meta device computes shapes and no values, so the step takes no memory and a second or two. What a kernel allocates
for itself, the CUDA context and the fragments of an allocator are not counted.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.models.layers import find_blocks
from paceline.models.recompute import recompute_blocks
from paceline.models.registry import build_model
from paceline.settings.schema import SHARDED
from paceline.training.plan import RunPlan, check_parts

_OPTIMIZER_COPIES = {"sgd": 1, "nesterov": 1, "adam": 2, "adamw": 2, "lamb": 2, "muon": 1}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per rank."""

    num_parameters: int
    weights: int  # and buffers
    averages: int  # of the weights
    gradients: int
    optimizer: int
    activations: int  # and everything else that lives only during a step, at its peak
    exchange: int  # what strategy and --exact hold beside the gradients

    @property
    def total(self) -> int:
        held = self.weights + self.averages + self.gradients + self.optimizer
        return held + self.activations + self.exchange


def estimate_memory(plan: RunPlan, strategy: str, *, is_mixed: bool, is_cuda: bool = False) -> MemoryEstimate:
    config = plan.config
    with torch.device("meta"):
        model = build_model(config.model, plan.input_shape, plan.info.num_classes, load_weights=False)
    check_parts(model, plan)
    parameters = list(model.parameters())
    whole = _bytes(parameters)
    trained = _bytes([parameter for parameter in parameters if parameter.requires_grad])
    shards = plan.world_size if strategy in SHARDED else 1  # under hsdp this is one node
    copies = _OPTIMIZER_COPIES[config.optim.optimizer]
    copies = copies if config.optim.momentum or copies > 1 else 0
    peak = _peak_of_step(model, plan)
    return MemoryEstimate(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weights=whole // shards + _bytes(list(model.buffers())),
        averages=whole // shards if config.optim.ema_decay else 0,
        gradients=trained // shards,
        optimizer=trained * copies // shards,
        # Mixed precision halves activations and keeps copies of the weights of half the size.
        activations=peak // 2 + whole // 2 if is_mixed else peak,
        exchange=_exchange(model, plan, strategy, trained, is_mixed=is_mixed, is_cuda=is_cuda),
    )


def _exchange(model: nn.Module, plan: RunPlan, strategy: str, trained: int, *, is_mixed: bool, is_cuda: bool) -> int:
    """Vectors beside the gradients.

    exact: the sums of finished subtrees and of the current lane. Sharded: a block that is gathered and the next one,
    and the whole gradients of one. ddp: none, because gradients are views of its buckets. (Ranks on the CPUs of one
    node share rows for their sum: the row of this rank and the total are counted.)
    """
    if plan.config.parallel.exact:
        return trained * ((plan.lanes // plan.world_size).bit_length() + 1)
    if strategy in SHARDED:
        largest = max((_bytes(list(block.parameters())) for block in find_blocks(model)), default=trained)
        return 3 * largest // (2 if is_mixed else 1)
    return 2 * trained if plan.world_size > 1 and strategy == "ddp" and not is_cuda else 0


def _peak_of_step(model: nn.Module, plan: RunPlan) -> int:
    """Bytes that live during a step beside weights and whole gradients."""
    config = plan.config
    if config.train.activation_checkpointing:
        recompute_blocks(model, draws_from_torch=":" in config.model.model_name)
    inputs = torch.empty(plan.microbatch_size, *plan.largest_shape, device="meta")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    live = LiveBytes()
    with live:
        for _ in range(min(config.train.accumulate, 2)):  # later microbatches add to existing gradients
            outputs = model(inputs)
            with suppress(NotImplementedError, RuntimeError):  # a user's autograd function may need values
                outputs.float().sum().backward()
    own = _bytes([inputs])
    gradients = _bytes([parameter.grad for parameter in trained if parameter.grad is not None])
    return max(live.peak - gradients, 0) + own


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made and still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage_id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        answer = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(answer):
            if isinstance(leaf, Tensor):
                self._count(leaf, given)
        return answer

    def _count(self, tensor: Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or key in given:  # a view, or a result in place
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _storage_id(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
