"""Lesson 4: the same step on two ranks as on one (up to rounding), with whole copies and with shards."""

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
from paceline.tools.course.ranks import describe_error, on_ranks
from paceline.tools.course.verdict import Failed, Item, cause_not_known

_RATE = 0.1
_STEPS = 3
_SAMPLES = 8


class Net(nn.Module):
    """Three small blocks and a head."""

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


def _train_alone(factor: float = 1.0, has_softmax: bool = False, is_cleared: bool = True) -> list[float]:
    """The weights of one process with the whole batch; with arguments, those of a known mistake."""
    net = _make_net().to(torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=_RATE)
    for step in range(_STEPS):
        inputs, labels = _batch(step)
        if is_cleared:
            optimizer.zero_grad()
        logits = net(inputs)
        loss = nn.functional.cross_entropy(logits.softmax(1) if has_softmax else logits, labels)
        (factor * loss).backward()
        optimizer.step()
    return _weights(net)


def _weights(net: nn.Module) -> list[float]:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return [float(value) for tensor in whole for value in tensor.detach().flatten()]


def _train(person: ModuleType, rank: int, world_size: int, strategy: str) -> dict[str, Any]:
    net = _make_net()
    wrapped_as = _note_dtype_when_wrapped()
    try:
        model, optimizer = person.build(net, strategy, torch.float64, _RATE)
    except Exception as error:
        if isinstance(net, FSDPModule) and not any(isinstance(block, FSDPModule) for block in net.blocks):
            return {"model_first": describe_error(error, Path(str(person.__file__)))}
        raise
    share = _SAMPLES // world_size
    report: dict[str, Any] = {
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "wrapped_as": wrapped_as,
        "is_ddp": isinstance(model, DistributedDataParallel),
        "is_fsdp": isinstance(model, FSDPModule),
        "sharded_blocks": sum(isinstance(block, FSDPModule) for block in net.blocks),
        "optimizer": _describe_optimizer(optimizer),
        "updated": len(_ids(optimizer) & {id(parameter) for parameter in model.parameters()}),
        "parameters": len(list(model.parameters())),
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


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """How it differs from plain SGD with the given rate; empty if it does not."""
    if type(optimizer) is not torch.optim.SGD:
        return f"the optimizer is {type(optimizer).__name__}"
    plain = torch.optim.SGD([torch.zeros(1)], lr=_RATE).param_groups[0]
    other = {
        name: value
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params" and value != plain[name]
    }
    return f"the optimizer has {', '.join(f'{name}={value}' for name, value in other.items())}" if other else ""


def _note_dtype_when_wrapped() -> list[str]:
    """Filled when the person wraps with DDP. A model that is moved later trains, but its gradients are not averaged."""
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
    if reports[0]["is_fsdp"]:
        raise Failed(
            "strategies-exchanged", "build(..., 'ddp', ...) shards the model", "Look at the test of `strategy`."
        )
    if not all(report["is_ddp"] for report in reports):
        raise Failed(
            "not-wrapped",
            "the model of build(..., 'ddp', ...) is not a DistributedDataParallel; "
            + ("the ranks' weights differ after 3 steps" if _differ(reports) else "nothing exchanges gradients"),
            "Without the wrapper each rank trains its own model on its own part of the data. There is no error, but "
            "two worse models.",
        )
    _require_optimizer(reports[0], "ddp")
    if _differ(reports):
        raise Failed(
            "bypasses-the-wrapper",
            "the model is wrapped, but the ranks' weights differ after 3 steps",
            "DDP averages gradients only if you call the wrapper: model(images), not model.module(images).",
        )
    _compare(reports, "ddp")


def check_fsdp(path: Path) -> None:
    reports = on_ranks(path, 2, _train, "fsdp")
    if "model_first" in reports[0]:
        raise Failed(
            "model-before-its-parts",
            reports[0]["model_first"],
            "fully_shard on the model takes all weights that are left. Shard the blocks first, then the model.",
        )
    _require_moved(reports)
    total = sum(parameter.numel() for parameter in _make_net().parameters())
    held = [report["held"] for report in reports]
    if not all(report["is_fsdp"] for report in reports):
        raise Failed(
            "not-sharded",
            f"build(..., 'fsdp', ...) left the whole model on each rank: {held} of {total} weights",
            "fully_shard replaces parameters by shards, in place. Call it on the blocks and then on the whole model.",
        )
    if reports[0]["sharded_blocks"] < 3:
        raise Failed(
            "root-only",
            f"{reports[0]['sharded_blocks']} of 3 blocks are groups of their own",
            "With one group for the whole model, all of it is gathered at once: the memory peak is that of DDP. "
            "Shard each block first, then the model: then one block at a time is whole.",
        )
    _require_optimizer(reports[0], "fsdp")
    _compare(reports, "fsdp")


def _require_moved(reports: list[dict[str, Any]]) -> None:
    report = reports[0]
    if report["dtypes"] != ["torch.float64"]:
        error = f"; a step failed: {report['dtype_error']}" if "dtype_error" in report else ""
        raise Failed(
            "not-moved",
            f"the weights are {', '.join(report['dtypes'])}, not float64{error}",
            "model.to(dtype) comes first: data and weights must have one type and one device.",
        )
    if report["wrapped_as"] == ["torch.float32"] or "dtype_error" in report:
        raise Failed(
            "moved-after-wrapping",
            "the model was wrapped as float32 and moved to float64 afterwards"
            + ("; the ranks' weights differ after 3 steps" if "weights" in report and _differ(reports) else ""),
            "The wrapper is set up for the parameters that it finds. Move the model (device, dtype) first, then wrap "
            "it, then make the optimizer.",
        )


def _differ(reports: list[dict[str, Any]]) -> bool:
    return any(report["weights"] != reports[0]["weights"] for report in reports)


def _require_optimizer(report: dict[str, Any], strategy: str) -> None:
    if report["updated"] == 0:
        raise Failed(
            "optimizer-before-wrapping",
            f"with {strategy} the optimizer holds none of the model's {report['parameters']} parameters",
            "fully_shard replaces the parameters. The old ones never get a gradient, so step() changes nothing. Make "
            "the optimizer last, from model.parameters().",
        )
    if report["updated"] < report["parameters"]:
        raise Failed(
            "parameters-left-out",
            f"with {strategy} the optimizer holds {report['updated']} of the model's {report['parameters']} parameters",
            "Make the optimizer from model.parameters() of the whole model, after wrapping.",
        )
    if report["optimizer"]:
        raise Failed(
            "not-plain-sgd",
            f"{report['optimizer']}; the exercise asks for plain SGD with lr={_RATE}",
            "torch.optim.SGD(model.parameters(), lr=lr), nothing else: the check compares the weights.",
        )


def _compare(reports: list[dict[str, Any]], strategy: str) -> None:
    found, right = torch.tensor(reports[0]["weights"]), torch.tensor(_train_alone())

    def is_like(weights: list[float]) -> bool:
        # The mean of two halves' means is rounded differently from the mean of the whole.
        return torch.allclose(found, torch.tensor(weights), rtol=0, atol=1e-10)

    if is_like(_train_alone()):
        return
    if torch.equal(found, torch.tensor(_weights(_make_net().to(torch.float64)))):
        raise Failed(
            "no-update",
            f"after {_STEPS} steps with {strategy} the weights are the same as at the start",
            "The optimizer has the right parameters, but step() finds no gradients, or is not called. The order is "
            "zero_grad, forward, backward, step.",
        )
    worst = (found - right).abs().max().item()
    what = f"after {_STEPS} steps with {strategy} the weights differ by up to {worst:.2g} from those of one process"
    if is_like(_train_alone(is_cleared=False)):
        raise Failed(
            "gradients-accumulate", what, "The gradients are never cleared: optimizer.zero_grad() in each step."
        )
    if is_like(_train_alone(factor=_SAMPLES / 2)):
        raise Failed("sum-for-mean", what, "The loss is the sum over the samples, not their mean: steps are too long.")
    if is_like(_train_alone(factor=0.5)):
        raise Failed(
            "divided-again",
            f"{what}; each step has half of its length",
            "The wrapper averages gradients over ranks already. Do not divide the loss, or the gradients, again.",
        )
    if is_like(_train_alone(factor=2.0)):
        raise Failed(
            "multiplied-again",
            f"{what}; each step has twice its length",
            "The wrapper averages gradients over ranks already. Do not multiply the loss by the number of ranks, and "
            "do not sum the gradients again. Call backward() and step() once for each batch.",
        )
    if is_like(_train_alone(has_softmax=True)):
        raise Failed("softmax-twice", what, "cross_entropy contains a softmax. Give it the model's output as it is.")
    raise cause_not_known(what, "zero_grad, mean cross-entropy of this rank's share, backward, step; nothing else.")


ITEMS = (
    Item("with DDP two ranks take the step of one process", check_ddp, ("build", "train_step")),
    Item("with FSDP too, and each rank stores a part", check_fsdp, ("build", "train_step")),
    *fsdp_choices.ITEMS,
    *fsdp_memory.ITEMS,
)
