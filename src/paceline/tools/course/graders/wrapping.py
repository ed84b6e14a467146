"""Lesson 4: the same step on two ranks as on one, with whole copies and with shards."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.tools.course.graders import fsdp_choices, fsdp_memory
from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item

_RATE = 0.1
_STEPS = 3
_SAMPLES = 8


class Net(nn.Module):
    """Three blocks and a head: small, and in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        logits: Tensor = self.head(inputs)
        return logits


def _make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(_SAMPLES, 16, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(4, (_SAMPLES,), generator=generator)


def _train_alone() -> list[float]:
    """What one process with the whole batch makes of it."""
    net = _make_net().to(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=_RATE)
    for step in range(_STEPS):
        inputs, labels = _batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    return _weights(net)


def _weights(net: nn.Module) -> list[float]:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return [float(value) for tensor in whole for value in tensor.detach().flatten()]


def _train(person: ModuleType, rank: int, world_size: int, strategy: str) -> dict[str, Any]:
    net = _make_net()
    wrapped_as = _note_dtype_when_wrapped()
    model, optimizer = person.build(net, strategy, torch.float64, _RATE)
    share = _SAMPLES // world_size
    report: dict[str, Any] = {
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "wrapped_as": wrapped_as,
        "is_ddp": isinstance(model, DistributedDataParallel),
        "is_fsdp": isinstance(model, FSDPModule),
        "sharded_blocks": sum(isinstance(block, FSDPModule) for block in net.blocks),
        "held": sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in net.parameters()),
    }
    for step in range(_STEPS):
        inputs, labels = _batch(step)
        mine = slice(rank * share, (rank + 1) * share)
        try:
            person.train_step(model, optimizer, inputs[mine], labels[mine])
        except RuntimeError as error:
            text = str(error)
            if "dtype" not in text and "type" not in text:
                raise
            return {**report, "dtype_error": text.splitlines()[0][:160]}
    return {**report, "weights": _weights(net)}


def _note_dtype_when_wrapped() -> list[str]:
    """Filled when the person wraps: a model moved after that trains on, but its ranks do not meet any more."""
    noted: list[str] = []
    original = DistributedDataParallel.__init__

    def noting(self: DistributedDataParallel, module: nn.Module, *arguments: Any, **options: Any) -> None:
        noted.append(str(next(module.parameters()).dtype))
        original(self, module, *arguments, **options)

    DistributedDataParallel.__init__ = noting  # type: ignore[method-assign]
    return noted


def check_ddp(path: Path) -> None:
    reports = on_ranks(path, 2, _train, "ddp")
    _require_moved(reports)
    if not all(report["is_ddp"] for report in reports):
        raise Failed(
            "not-wrapped",
            "the model of build(..., 'ddp', ...) is not a DistributedDataParallel; "
            + ("the ranks' weights differ after 3 steps" if _differ(reports) else "nothing exchanges gradients"),
            "Without the wrapper each rank trains a model of its own, on its own part of the data. Nothing fails: "
            "there are just two worse models.",
        )
    if _differ(reports):
        raise Failed(
            "bypasses-the-wrapper",
            "the model is wrapped, and still the ranks' weights differ after 3 steps",
            "DDP hooks into its own forward pass. Call the wrapper, model(images): model.module(images) goes past it.",
        )
    _compare(reports, "ddp")


def check_fsdp(path: Path) -> None:
    reports = on_ranks(path, 2, _train, "fsdp")
    _require_moved(reports)
    total = sum(parameter.numel() for parameter in _make_net().parameters())
    held = [report["held"] for report in reports]
    if not all(report["is_fsdp"] for report in reports):
        raise Failed(
            "not-sharded",
            f"build(..., 'fsdp', ...) left the whole model on each rank: {held} of {total} weights",
            "fully_shard(model) turns the parameters into shards, in place; it must be called on the whole model too, "
            "after its blocks.",
        )
    if reports[0]["sharded_blocks"] < 3:
        raise Failed(
            "root-only",
            f"{reports[0]['sharded_blocks']} of 3 blocks are sharded by themselves",
            "fully_shard on the whole model alone gathers all of it for the forward pass: the memory peak is that of "
            "DDP. Shard each block first, then the rest: one block at a time is whole.",
        )
    _compare(reports, "fsdp")


def _require_moved(reports: list[dict[str, Any]]) -> None:
    report = reports[0]
    if report["dtypes"] != ["torch.float64"]:
        error = f"; a step failed: {report['dtype_error']}" if "dtype_error" in report else ""
        raise Failed(
            "not-moved",
            f"the weights are {', '.join(report['dtypes'])}, not float64{error}",
            "model.to(dtype) comes first: data and weights must be of one kind, and on one device.",
        )
    if report["wrapped_as"] == ["torch.float32"] or "dtype_error" in report:
        raise Failed(
            "moved-after-wrapping",
            "the model was wrapped as float32 and moved to float64 afterwards"
            + ("; the ranks' weights differ after 3 steps" if "weights" in report and _differ(reports) else ""),
            "The wrapper lays out its buckets for the parameters it finds; what comes after is not in them. Move the "
            "model (device, dtype) first, then wrap it, then make the optimizer.",
        )


def _differ(reports: list[dict[str, Any]]) -> bool:
    return any(report["weights"] != reports[0]["weights"] for report in reports)


def _compare(reports: list[dict[str, Any]], strategy: str) -> None:
    found, right = torch.tensor(reports[0]["weights"]), torch.tensor(_train_alone())
    if torch.equal(found, torch.tensor(_weights(_make_net().to(torch.float64)))):
        raise Failed(
            "optimizer-before-wrapping",
            f"after {_STEPS} steps with {strategy} the weights are what they were at the start",
            "The optimizer holds parameters that are not the model's any more: fully_shard replaced them. Make the "
            "optimizer from the wrapped model's parameters. (Or is there no optimizer.step() in train_step?)",
        )
    # The mean of two halves' means is rounded otherwise than the mean of the whole: equal up to float64's noise.
    if not torch.allclose(found, right, rtol=0, atol=1e-10):
        worst = (found - right).abs().max().item()
        raise Failed(
            "another-step",
            f"after {_STEPS} steps with {strategy} the weights are off by up to {worst:.2g} from one process's",
            "Two ranks with half a batch each should do the very step of one with the whole: mean loss of the own "
            "half, zero_grad, backward, step, nothing multiplied or divided by the number of ranks.",
        )


ITEMS = (
    Item("with DDP two ranks take the step of one", check_ddp, ("build", "train_step")),
    Item("with FSDP too, and each rank holds a part", check_fsdp, ("build", "train_step")),
    *fsdp_choices.ITEMS,
    *fsdp_memory.ITEMS,
)
