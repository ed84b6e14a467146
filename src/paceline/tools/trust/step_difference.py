"""Where two replays first differ inside one step: batch, layer, loss, gradient or update, and for which sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoints.capture import gather_whole, model_tensors, optimizer_tensors
from paceline.data.loader import Batch
from paceline.parallel.digests import digest_tensors
from paceline.parallel.parts import bits
from paceline.training.replay import Replay


@dataclass(frozen=True)
class Place:
    """The first difference inside a step."""

    what: str  # for example: the output of body.1
    sample: int | None = None  # its id in the data set; None: not of one sample
    position: int | None = None  # of the sample in the global batch, from 0

    def __str__(self) -> str:
        return (
            self.what
            if self.sample is None
            else f"{self.what}, of sample {self.sample} (place {self.position} of the batch)"
        )


@dataclass
class StepTrace:
    """Everything that one step computed."""

    batch: Batch
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)  # of the layers, in the order in which they ran
    loss: float = float("nan")
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)  # after the update


def state_of(replay: Replay) -> dict[str, Tensor]:
    """The tensors that the next steps depend on, by name."""
    components = replay.components
    module = components.model.module
    return {
        **gather_whole(model_tensors(module), "cpu"),
        **{f"optimizer of {name}": value for name, value in _optimizer(replay).items()},
        **{f"moving average of {name}": value.detach().cpu() for name, value in components.average_values().items()},
    }


def _optimizer(replay: Replay) -> dict[str, Tensor]:
    components = replay.components
    return gather_whole(optimizer_tensors(components.model.module, components.optimizer), "cpu")


def digest_state(replay: Replay) -> tuple[int, ...]:
    """A number per tensor of the state: the same if and, but for rare accidents, only if all bits are the same."""
    components = replay.components
    module = components.model.module
    tensors = [*module.parameters(), *module.buffers(), *components.average_values().values()]
    for values in components.optimizer.state.values():
        tensors += [value for value in values.values() if isinstance(value, Tensor)]
    device = torch.device(replay.session.world.device)
    here = [tensor.detach().to(device) for tensor in tensors]
    return tuple(digest_tensors([bits(tensor) for tensor in here], device).tolist())


def trace_step(replay: Replay) -> StepTrace:
    """Take the next step and keep what it computes."""
    trace = StepTrace(_next_batch(replay))

    def keep_gradients() -> None:
        trace.gradients = {name: value.detach().cpu().clone() for name, value in replay.gradients().items()}

    replay.before_update = keep_gradients
    with _kept_outputs(replay.components.model.module, trace.outputs):
        for taken in replay.steps(replay.step + 1):
            trace.loss = taken.loss
    replay.before_update = None
    trace.state = state_of(replay)
    return trace


def _next_batch(replay: Replay) -> Batch:
    session, components = replay.session, replay.components
    epoch, inside = components.plan.clock.locate(replay.step)
    return next(
        components.train_data.train_epoch(
            seed=session.config.train.seed,
            epoch=epoch,
            global_batch_size=session.config.train.global_batch_size,
            first_step=inside,
        )
    )


@contextmanager
def _kept_outputs(model: nn.Module, kept: list[tuple[str, Tensor]]) -> Iterator[None]:
    """The outputs of all layers without children. A lane or a microbatch adds its rows to those before."""
    places: dict[str, int] = {}

    def keep(name: str, output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        value = output.detach().cpu().clone()
        if name in places and kept[places[name]][1].shape[1:] == value.shape[1:]:
            kept[places[name]] = name, torch.cat([kept[places[name]][1], value])
        elif name not in places:
            places[name] = len(kept)
            kept.append((name, value))

    leaves = [(name, layer) for name, layer in model.named_modules() if not list(layer.children())]
    hooks = [layer.register_forward_hook(lambda _, __, output, name=name: keep(name, output)) for name, layer in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def first_difference(one: StepTrace, other: StepTrace) -> Place | None:
    """In the order of computation; None if the two steps are the same."""
    in_batch = _in_batch(one.batch, other.batch)
    if in_batch is not None:
        return in_batch
    ids = one.batch.ids.tolist()
    for (name, mine), (_, theirs) in zip(one.outputs, other.outputs, strict=False):
        row = _first_row(mine, theirs)
        if row is not None:
            is_sample = len(mine) == len(ids)
            return Place(f"the output of {name}", ids[row] if is_sample else None, row if is_sample else None)
    if one.loss != other.loss:
        return Place("the loss")
    gradient = first_tensor(one.gradients, other.gradients, backwards=True)
    if gradient is not None:
        return Place(f"the gradient of {gradient}")
    updated = first_tensor(one.state, other.state)
    return Place(f"the update of {updated}") if updated is not None else None


def _in_batch(one: Batch, other: Batch) -> Place | None:
    ids, theirs = one.ids.tolist(), other.ids.tolist()
    if ids != theirs:
        place = next(
            (number for number, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b),
            min(len(ids), len(theirs)),
        )
        a, b = (values[place] if place < len(values) else "none" for values in (ids, theirs))
        return Place(f"the order of samples: at place {place} sample {a} in A, {b} in B")
    for what, mine, others in (("the input", one.inputs, other.inputs), ("the label", one.labels, other.labels)):
        row = _first_row(mine, others)
        if row is not None:
            return Place(what, ids[row], row)
    return None


def _first_row(one: Tensor, other: Tensor) -> int | None:
    """The first row in which a bit differs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return 0
    if one.dim() == 0:
        return None if torch.equal(bits(one), bits(other)) else 0
    rows = (bits(one) != bits(other)).flatten(1).any(1) if one.dim() > 1 else bits(one) != bits(other)
    found = rows.nonzero()
    return int(found[0]) if len(found) else None


def first_tensor(one: dict[str, Tensor], other: dict[str, Tensor], *, backwards: bool = False) -> str | None:
    """The name of the first tensor that differs in a bit, a shape or its existence."""
    names = list(dict.fromkeys([*one, *other]))
    for name in reversed(names) if backwards else names:
        if name not in one or name not in other or _first_row(one[name], other[name]) is not None:
            return name
    return None
