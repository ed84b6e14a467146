"""Lesson 6: an epoch of training, and an evaluation with the same result on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.tools.course.graders import wrong_mean
from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item, cause_not_known

Batch = tuple[Tensor, Tensor]
_RATE = 0.5
# How many samples each batch of each rank has: unequal on purpose.
_SHARES = ((5, 5, 3), (5, 2))


class Watched(nn.Module):
    """A linear model with dropout that records the state in which it is called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.5)
        self.was_training: list[bool] = []
        self.had_gradients: list[bool] = []
        self.events: list[str] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.events.append("forward")
        self.was_training.append(self.training)
        self.had_gradients.append(torch.is_grad_enabled())
        logits: Tensor = self.linear(self.dropout(inputs))
        return logits


class _Plain(Watched):
    """Without dropout: the weights can be compared bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)


def _batches(sizes: tuple[int, ...], seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


# --- Training ---------------------------------------------------------------------------------------------------------


class _RecordedSGD(torch.optim.SGD):
    """Plain SGD that records its calls."""

    def __init__(self, parameters: Iterable[nn.Parameter], events: list[str]) -> None:
        super().__init__(parameters, lr=_RATE)
        self.events = events

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.events.append("zero_grad")
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        self.events.append("step")
        return super().step(closure)


@dataclass(frozen=True)
class _Trained:
    weights: list[float]
    was_training: list[bool]
    events: list[str]  # forward, backward, zero_grad, step: in order


def _train(train: Callable[..., Any]) -> _Trained:
    model = _Plain()
    model.eval()  # as an evaluation leaves it
    train(model, _RecordedSGD(model.parameters(), model.events), _batches((4, 4, 4), seed=1))
    weights = [float(v) for p in model.parameters() for v in p.detach().flatten()]
    return _Trained(weights, model.was_training, model.events)


def _train_person(person: ModuleType, rank: int, world_size: int) -> _Trained:
    original: Any = Tensor.backward

    def train(model: Watched, optimizer: _RecordedSGD, batches: list[Batch]) -> None:
        def record(tensor: Tensor, *arguments: Any, **options: Any) -> None:
            model.events.append("backward")
            original(tensor, *arguments, **options)

        setattr(Tensor, "backward", record)  # noqa: B010 - mypy does not allow the assignment
        person.train_epoch(model, optimizer, batches)

    return _train(train)


def _train_like(order: str, reduction: str = "mean", has_softmax: bool = False) -> list[float]:
    """The weights of a loop in this order. z: zero_grad, b: forward and backward, s: step."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> None:
        for inputs, labels in batches:
            for letter in order:
                if letter == "z":
                    optimizer.zero_grad()
                elif letter == "s":
                    optimizer.step()
                else:
                    logits = model(inputs).softmax(1) if has_softmax else model(inputs)
                    nn.functional.cross_entropy(logits, labels, reduction=reduction).backward()

    return _train(train).weights


def check_training(path: Path) -> None:
    found = on_ranks(path, 1, _train_person)[0]
    if found.weights != _train_like("zbs"):
        raise _explain_training(found)
    if not all(found.was_training):
        raise Failed(
            "left-in-eval-mode",
            "the model was in eval mode, as an evaluation leaves it, and was trained in that mode",
            "model.train() at the start: dropout must be active, and BatchNorm must update its statistics.",
        )


def _explain_training(found: _Trained) -> Failed:
    calls = {name: found.events.count(name) for name in ("zero_grad", "forward", "backward", "step")}
    what = "for 3 batches there were " + ", ".join(f"{count} x {name}" for name, count in calls.items())
    if calls["forward"] != 3:
        return Failed("batches-left-out", what, "Each batch goes through the model once.")
    for name in ("backward", "step"):
        if calls[name] == 0:
            return Failed(f"missing-{name}", what, "For each batch: zero_grad, forward, cross_entropy, backward, step.")
    order = [name for name in found.events if name != "forward"][:3]
    what = f"{what}; the order is {', '.join(order)}"
    if order.index("step") < order.index("backward") if {"step", "backward"} <= set(order) else False:
        return Failed(
            "step-before-backward",
            what,
            "step() uses the gradients that backward() makes, so it comes after it.",
        )
    if order == ["backward", "zero_grad", "step"]:
        return Failed(
            "gradients-thrown-away",
            what,
            "zero_grad() deletes the gradients just before step() uses them. Call it first.",
        )
    if found.weights == _train_like("bs"):
        return Failed(
            "gradients-accumulate",
            f"{what}; the weights are those of a loop that never clears its gradients",
            "backward() adds to the gradients of the steps before. Call optimizer.zero_grad() before backward().",
        )
    if found.weights == _train_like("zbs", reduction="sum"):
        return Failed("sum-for-mean", what, "The loss is the sum over the batch: a larger batch makes a larger step.")
    if found.weights == _train_like("zbs", has_softmax=True):
        return Failed("softmax-twice", what, "cross_entropy contains a softmax. Give it the model's output as it is.")
    return cause_not_known(
        f"{what}; the weights are not those of one step per batch with its mean cross-entropy",
        "for each batch zero_grad, forward, cross_entropy, backward, step.",
    )


# --- Evaluation -------------------------------------------------------------------------------------------------------


def _evaluate(person: ModuleType, rank: int, world_size: int) -> dict[str, Any]:
    model = Watched()
    model.train()  # as training leaves it
    reduced: list[torch.dtype] = []
    original = dist.all_reduce

    def record(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        reduced.append(tensor.dtype)
        return original(tensor, *arguments, **options)

    dist.all_reduce = record
    loss, accuracy = person.evaluate(model, _batches(_SHARES[rank], seed=10 + rank))
    return {
        "answer": (float(loss), float(accuracy)),
        "was_training": model.was_training,
        "had_gradients": model.had_gradients,
        "reduced": reduced,
    }


def _measure(batches: list[Batch]) -> tuple[float, float, int]:
    """Loss sum, number of right answers, number of samples."""
    model = Watched().eval()
    loss, right, count = 0.0, 0, 0
    with torch.no_grad():
        for inputs, labels in batches:
            logits = model(inputs)
            loss += nn.functional.cross_entropy(logits, labels, reduction="sum").double().item()
            right += int((logits.argmax(1) == labels).sum())
            count += len(labels)
    return loss, right, count


def check_evaluation(path: Path) -> None:
    reports = on_ranks(path, 2, _evaluate)
    if any(any(report["was_training"]) for report in reports):
        raise Failed(
            "dropout-in-evaluation",
            "the model was in training mode while it was evaluated",
            "model.eval() first: otherwise dropout is active, and half of the inputs are set to 0.",
        )
    if any(any(report["had_gradients"]) for report in reports):
        raise Failed(
            "graph-in-evaluation",
            "a graph for gradients was built during evaluation",
            "The activations of every layer are kept for a backward pass that is never called. Use torch.no_grad().",
        )
    problem = _explain_evaluation([report["answer"] for report in reports])
    if problem is not None:
        raise problem
    if narrow := {str(dtype) for dtype in reports[0]["reduced"] if dtype.is_floating_point and dtype != torch.float64}:
        raise Failed(
            "counts-in-float32",
            f"the result is right here, but the sums are {', '.join(sorted(narrow))}",
            "float32 cannot count beyond 16,777,216, and its sums lose digits. Use dtype=torch.float64 for the sums.",
        )


def _known_results() -> dict[str, list[tuple[float, float]]]:
    """Loss and accuracy by rank: the right ones, and those of known mistakes."""
    batches = [_batches(sizes, seed=10 + rank) for rank, sizes in enumerate(_SHARES)]
    sums = [_measure(share) for share in batches]
    loss, hits, count = (sum(column) for column in zip(*sums, strict=True))
    right = (loss / count, hits / count)
    of_batches = [[(m[0] / m[2], m[1] / m[2]) for m in (_measure([batch]) for batch in share)] for share in batches]
    own = [(share[0] / share[2], share[1] / share[2]) for share in sums]
    own_of_batches = [_mean(share) for share in of_batches]
    all_batches = [pair for share in of_batches for pair in share]
    added = (sum(pair[0] for pair in all_batches) / count, sum(pair[1] for pair in all_batches) / count)
    return {
        "right": [right] * 2,
        "own": own,
        "own of batches": own_of_batches,
        "mean of ranks": [_mean(own)] * 2,
        "mean of batches": [_mean(own_of_batches)] * 2,
        "mean of all batches": [_mean(all_batches)] * 2,
        "twice": [(2 * right[0], 2 * right[1])] * 2,
        "not divided": [(loss, hits)] * 2,
        "means added": [added] * 2,
        "nothing": [(0.0, 0.0)] * 2,
        "percent": [(100 * right[0], 100 * right[1])] * 2,
        "errors": [(math.inf, 1 - right[1])] * 2,
    }


def _explain_evaluation(found: list[tuple[float, float]]) -> Failed | None:
    known = _known_results()
    seen = ", ".join(f"rank {rank} returns {a:.4f} and {b:.4f}" for rank, (a, b) in enumerate(found))
    right = known["right"][0]
    what = f"loss {right[0]:.4f} and accuracy {right[1]:.4f} are right; {seen}"
    if all(abs(a - right[1]) < 1e-5 and abs(b - right[0]) < 1e-5 for a, b in found):
        return Failed("results-exchanged", what, "Return the loss first, then the accuracy.")
    for number, name in enumerate(("loss", "accuracy")):
        values = [answer[number] for answer in found]
        # Sums of floats may be formed in any order and precision here.
        mistake = next(
            (
                mistake
                for mistake, answers in known.items()
                if all(abs(a - b[number]) < 1e-5 for a, b in zip(values, answers, strict=True))
            ),
            "",
        )
        if mistake != "right":
            return _name_mistake(mistake, name, f"{what}; the {name} is wrong")
    return None


def _name_mistake(mistake: str, name: str, what: str) -> Failed:
    if mistake.startswith("own"):
        return Failed(
            "own-shard-only",
            what,
            "Each rank returns the result of its own part. Add up over ranks (all_reduce) first.",
        )
    if mistake.startswith("mean of"):
        return Failed(
            "mean-of-means",
            what,
            "An average of averages gives more weight to the samples of a small batch. Add up sums and counts over "
            "batches and ranks, and divide once, at the end.",
        )
    hints = {
        "twice": ("missing-division", "It is the sum of both ranks' values: divide by the samples of both ranks."),
        "not divided": ("missing-division", "It is a sum over samples: divide by the number of samples."),
        "nothing": ("nothing-added", f"It is 0: nothing is added to the sum of the {name}."),
        "means added": (
            "batch-means-added",
            "A mean of each batch is added where a sum belongs: reduction='sum', or multiply by len(labels).",
        ),
        "percent": ("percent", "It is in percent. The exercise asks for a fraction between 0 and 1."),
        "errors": ("errors-counted", "It is the part of wrong answers. Count the right ones."),
    }
    if mistake in hints:
        return Failed(hints[mistake][0], what, hints[mistake][1])
    return cause_not_known(what, "sums of losses, right answers and samples over batches and ranks, then one division.")


def _mean(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(a for a, _ in pairs) / len(pairs), sum(b for _, b in pairs) / len(pairs)


ITEMS = (
    Item("an epoch takes one correct step per batch", check_training, ("train_epoch",)),
    Item("two ranks with unequal shares return the true loss and accuracy", check_evaluation, ("evaluate",)),
    *wrong_mean.ITEMS,
)
