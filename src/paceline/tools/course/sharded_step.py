"""Measure a step of a sharded model: gathers, reductions, and which weights are whole at which moment."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

BLOCKS = 4
_WIDTH = 256
_CLASSES = 4
_SAMPLES = 8
_TIMED_STEPS = 5


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _WIDTH)
        self.down = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = inputs + self.down(torch.tanh(self.up(inputs)))
        return result


class Stack(nn.Module):
    """Four blocks in two stages, with a layer before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(_WIDTH, _WIDTH)
        self.stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(BLOCKS // 2))
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.stem(inputs)
        for stage in self.stages:
            inputs = stage(inputs)
        logits: Tensor = self.head(inputs)
        return logits


def make_stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def find_blocks(model: nn.Module) -> dict[str, Block]:
    return {name: part for name, part in model.named_modules() if isinstance(part, Block)}


def count_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class _Exchanges(TorchDispatchMode):
    """Every gather and every reduction of a step: type, number of weights, bytes that one rank receives or sends."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gathers: list[tuple[str, int, int]] = []
        self.sums: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::_allgather_base_":
            self.gathers.append(_describe(args[0], args[1]))
        elif func.name() == "c10d::_reduce_scatter_base_":
            self.sums.append(_describe(args[1], args[0]))
        return func(*args, **(kwargs or {}))


def _describe(whole: Tensor, shard: Tensor) -> tuple[str, int, int]:
    return str(whole.dtype).removeprefix("torch."), whole.numel(), whole.nbytes - shard.nbytes


@dataclass
class ShardedStepReport:
    """What one step of a sharded model did on one rank."""

    groups: list[str]
    stored: list[str]  # types of the shards
    error: str = ""
    gathers: list[tuple[str, int, int]] = field(default_factory=list)
    sums: list[tuple[str, int, int]] = field(default_factory=list)
    output: str = ""
    blocks_kept: list[str] = field(default_factory=list)  # whole after the forward pass
    is_rest_kept: bool = False
    most_blocks: int = 0  # whole at once in the forward pass
    most_whole_mb: float = 0.0
    difference: float = 0.0  # of the weights after the step, from ours
    step_ms: float = 0.0

    @property
    def sent_mb(self) -> float:
        return sum(size for _, _, size in (*self.gathers, *self.sums)) / 1e6


def find_groups(model: nn.Module) -> list[str]:
    """Names of the modules that fully_shard was called on; the model's own is empty."""
    return [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]


def gather_by_rank(names: list[str], world_size: int) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(world_size)]
    dist.all_gather_object(found, names)
    return found


def _is_whole(module: nn.Module) -> bool:
    return not any(isinstance(parameter, DTensor) for parameter in module.parameters())


def take_step(model: nn.Module, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(_SAMPLES, _WIDTH, generator=generator)
    labels = torch.randint(_CLASSES, (_SAMPLES,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


def watch_step(model: nn.Module, rank: int) -> ShardedStepReport:
    blocks = find_blocks(model)
    stored = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    report = ShardedStepReport(find_groups(model), stored)

    def look(*_: Any) -> None:
        report.most_blocks = max(report.most_blocks, sum(_is_whole(block) for block in blocks.values()))
        whole = sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor))
        report.most_whole_mb = max(report.most_whole_mb, whole / 1e6)

    def note_forward(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        report.output = str(output.dtype).removeprefix("torch.")
        report.blocks_kept = [name for name, block in blocks.items() if _is_whole(block)]
        report.is_rest_kept = not isinstance(model.get_parameter("head.weight"), DTensor)

    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    hooks.append(model.register_forward_hook(note_forward))
    exchanges = _Exchanges()
    try:
        with exchanges:
            take_step(model, rank)
    except RuntimeError as error:
        if "dtype" not in str(error):
            raise
        report.error = str(error).splitlines()[0][:160]
    for hook in hooks:
        hook.remove()
    report.gathers, report.sums = exchanges.gathers, exchanges.sums
    return report


def full_weights(model: nn.Module) -> list[Tensor]:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [tensor.detach() for tensor in whole]


def time_steps(model: nn.Module, rank: int) -> float:
    times = []
    for _ in range(_TIMED_STEPS):
        began = time.perf_counter()
        take_step(model, rank)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000
