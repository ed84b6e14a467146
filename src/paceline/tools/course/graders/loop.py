"""Lesson 6: an epoch of training, and an evaluation that every rank agrees on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item

Batch = tuple[Tensor, Tensor]
_RATE = 0.5
# How many samples each batch of each rank has: unequal on purpose.
_SHARES = ((5, 5, 3), (5, 2))


class Watched(nn.Module):
    """A linear model with dropout that remembers in which state it was called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.5)
        self.was_training: list[bool] = []
        self.had_gradients: list[bool] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.was_training.append(self.training)
        self.had_gradients.append(torch.is_grad_enabled())
        logits: Tensor = self.linear(self.dropout(inputs))
        return logits


class _Plain(Watched):
    """Without dropout, so that training can be followed to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)


def _batches(sizes: tuple[int, ...], seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]


# --- Training ---------------------------------------------------------------------------------------------------------


def _one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, order: str) -> None:
    """z: zero_grad, b: forward and backward, s: step."""
    for letter in order:
        if letter == "z":
            optimizer.zero_grad()
        elif letter == "s":
            optimizer.step()
        else:
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def _train(train: Callable[..., Any]) -> tuple[list[float], list[bool]]:
    model = _Plain()
    model.eval()  # as an evaluation leaves it
    train(model, torch.optim.SGD(model.parameters(), lr=_RATE), _batches((4, 4, 4), seed=1))
    return [float(v) for p in model.parameters() for v in p.detach().flatten()], model.was_training


def _train_person(person: ModuleType, rank: int, world_size: int) -> tuple[list[float], list[bool]]:
    return _train(person.train_epoch)


def _train_in_order(order: str) -> list[float]:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> None:
        for batch in batches:
            _one_step(model, optimizer, batch, order)

    return _train(train)[0]


def check_training(path: Path) -> None:
    found, was_training = on_ranks(path, 1, _train_person)[0]
    causes = {
        "bs": (
            "gradients-accumulate",
            "the weights are those of a loop that never clears its gradients",
            "backward() adds to what is there: each step then uses the gradients of all steps before it. "
            "optimizer.zero_grad() before backward().",
        ),
        "bzs": (
            "gradients-thrown-away",
            "the weights have not changed",
            "When step() ran there were no gradients: it comes after backward(), with no zero_grad() in between.",
        ),
        "sb": (
            "step-before-backward",
            "each step used the gradients of the batches before it",
            "step() uses the gradients that backward() leaves; it comes after it.",
        ),
    }
    if found != _train_in_order("zbs"):
        for order, (hint, what, advice) in causes.items():
            if found == _train_in_order(order):
                raise Failed(hint, what, advice)
        raise Failed(
            "another-epoch",
            "the weights are not those of one step per batch with its mean cross-entropy",
            "For each batch: zero_grad, forward, cross_entropy, backward, step.",
        )
    if not all(was_training):
        raise Failed(
            "left-in-eval-mode",
            "the model came from an evaluation and was trained as it was, in eval mode",
            "model.train() at the start: dropout must drop, and BatchNorm must learn its statistics.",
        )


# --- Evaluation -------------------------------------------------------------------------------------------------------


def _evaluate(person: ModuleType, rank: int, world_size: int) -> dict[str, Any]:
    model = Watched()
    model.train()  # as training leaves it
    loss, accuracy = person.evaluate(model, _batches(_SHARES[rank], seed=10 + rank))
    return {
        "answer": (float(loss), float(accuracy)),
        "was_training": model.was_training,
        "had_gradients": model.had_gradients,
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


def _is_close(found: tuple[float, float], right: tuple[float, float]) -> bool:
    # Sums of floats may be formed in any order and precision here.
    return all(abs(a - b) < 1e-5 for a, b in zip(found, right, strict=True))


def check_evaluation(path: Path) -> None:
    reports = on_ranks(path, 2, _evaluate)
    if any(any(report["was_training"]) for report in reports):
        raise Failed(
            "dropout-in-evaluation",
            "the model was in training mode while it was evaluated",
            "model.eval() first: otherwise dropout throws away half of what the model knows.",
        )
    if any(any(report["had_gradients"]) for report in reports):
        raise Failed(
            "graph-in-evaluation",
            "a graph for gradients was built during evaluation",
            "The answer is right, but every layer's activations are kept for a backward pass that never comes. "
            "Put it under torch.no_grad().",
        )
    _check_answers([report["answer"] for report in reports])


def _check_answers(found: list[tuple[float, float]]) -> None:
    batches = [_batches(sizes, seed=10 + rank) for rank, sizes in enumerate(_SHARES)]
    sums = [_measure(share) for share in batches]
    loss, hits, count = (sum(column) for column in zip(*sums, strict=True))
    right = (loss / count, hits / count)
    if all(_is_close(answer, right) for answer in found):
        return
    told = ", ".join(f"rank {rank} says {a:.4f} and {b:.4f}" for rank, (a, b) in enumerate(found))
    what = f"loss {right[0]:.4f} and accuracy {right[1]:.4f} are right; {told}"
    own = [(share[0] / share[2], share[1] / share[2]) for share in sums]
    own_of_batches = [_mean([(m[0] / m[2], m[1] / m[2]) for m in (_measure([b]) for b in share)]) for share in batches]
    if any(_is_close(found[rank], mine[rank]) for mine in (own, own_of_batches) for rank in range(2)):
        raise Failed(
            "own-shard-only",
            what,
            "Each rank tells of its own part. Add up over ranks (all_reduce) before you divide.",
        )
    if all(_is_close(answer, (2 * right[0], 2 * right[1])) for answer in found):
        raise Failed("missing-division", what, "That is the sum of both ranks' values: twice too much.")
    if any(_is_close(found[0], means) for means in (_mean(own), _mean(own_of_batches))) or _is_half_mean(found, sums):
        raise Failed(
            "mean-of-means",
            what,
            "An average of averages counts a small batch as much as a large one. Add up sums and counts - of loss, of "
            "right answers, of samples - over batches and ranks, and divide once, at the end.",
        )
    raise Failed(
        "wrong-evaluation", what, "Sum of losses, number of right answers, number of samples: add all three over ranks."
    )


def _mean(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(a for a, _ in pairs) / len(pairs), sum(b for _, b in pairs) / len(pairs)


def _is_half_mean(found: list[tuple[float, float]], sums: list[tuple[float, float, int]]) -> bool:
    """One of the two numbers is right, the other an average of averages."""
    mean = _mean([(loss / count, hits / count) for loss, hits, count in sums])
    return any(abs(a - b) < 1e-5 for a, b in zip(found[0], mean, strict=True))


ITEMS = (
    Item("an epoch takes one clean step per batch", check_training, ("train_epoch",)),
    Item("two ranks with unequal shares agree on the true loss and accuracy", check_evaluation, ("evaluate",)),
)
