"""Exact evaluation: every sample once, sums and counts added over ranks, no padding counted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.data.loader import Loader
from paceline.metrics.throughput import Stopwatch
from paceline.parallel.apply import ParallelModel, autocast
from paceline.parallel.collectives import sum_lanes, sum_over_ranks
from paceline.runtime.detect import World
from paceline.training.examples import Examples
from paceline.training.objective import Objective

EVALUATION_SCHEMA = 1  # increased when a field of evaluation.json changes its meaning or is removed


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation, over all ranks."""

    loss: float
    accuracy: float
    samples: int
    throughput: float
    confusion: list[list[int]]  # rows: true class, columns: predicted class
    metrics: dict[str, float] = field(default_factory=dict)  # the user's own metrics

    def class_accuracy(self) -> list[float | None]:
        """Per class; None for a class without samples."""
        return [row[index] / sum(row) if sum(row) else None for index, row in enumerate(self.confusion)]

    def by_class(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """The part of an evaluation that needs the names of the classes, for JSON."""
        return {
            "samples": self.samples,
            "class_accuracy": dict(zip(classes, self.class_accuracy(), strict=True)),
            "confusion_matrix": self.confusion,
        }

    def to_json(self, classes: tuple[str, ...], *, step: int, checkpoint: str) -> dict[str, Any]:
        """The content of evaluation.json: the test of one checkpoint."""
        return {
            "schema_version": EVALUATION_SCHEMA,
            "test_accuracy": self.accuracy,
            "test_loss": self.loss,
            "test_metrics": self.metrics,
            "step": step,
            "checkpoint": checkpoint,
            **self.by_class(classes),
        }


@torch.no_grad()
def evaluate(
    model: ParallelModel,
    loader: Loader,
    world: World,
    *,
    num_classes: int,
    batch_size: int,
    objective: Objective | None = None,
    shares_per_rank: int = 1,
    views: int = 1,
    max_batches: int | None = None,
    on_batch: Callable[[], None] | None = None,
    examples: Examples | None = None,
) -> Evaluation:
    """Run a part of the data through the model. Collective: every rank must call it.

    `on_batch` is called before each batch. It may raise, on all ranks at the same batch, to end the evaluation there.
    """
    watch = Stopwatch()
    objective = objective or Objective()
    sums = torch.zeros(shares_per_rank, 1 + len(objective.metrics), dtype=torch.float64, device=world.device)
    confusion = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=world.device)
    model.module.eval()
    batches = loader.evaluation_batches(batch_size, shares_per_rank=shares_per_rank)
    try:
        for batch in itertools.islice(batches, max_batches):
            if on_batch is not None:
                on_batch()
            with autocast(model, world):
                logits = average_over_views(model.module, batch.inputs, views).float()
            if batch.is_counted:
                sums[batch.share] += objective.sums(logits, batch.labels)
                cells = batch.labels * num_classes + logits.argmax(1)
                confusion += torch.bincount(cells, minlength=len(confusion))
                if examples is not None:
                    examples.collect(batch.inputs, batch.labels, logits)
    finally:
        model.module.train()
        model.release_gathered()
    sum_over_ranks(confusion, world)
    totals = sum_lanes(sums, world).tolist()
    return _finish(totals, list(objective.metrics), confusion.view(num_classes, num_classes).cpu(), watch)


def average_over_views(model: Callable[[Tensor], Tensor], inputs: Tensor, views: int) -> Tensor:
    """Logits averaged over views of each image: 1 as it is, 2 with its mirror image, 6 with both shifted two ways."""
    if views == 1:
        return model(inputs)
    logits = (model(inputs) + model(inputs.flip(3))) / 2
    if views == 2:
        return logits
    height, width = inputs.shape[2:]
    bordered = F.pad(inputs, [1] * 4, mode="reflect")
    for shift in (0, 2):  # by a pixel, up and to the left, then down and to the right
        shifted = bordered[:, :, shift : shift + height, shift : shift + width]
        shifted = shifted.contiguous(memory_format=torch.channels_last)
        logits = logits + average_over_views(model, shifted, 2) / 2
    return logits / 2


def _finish(totals: list[float], metrics: list[str], confusion: Tensor, watch: Stopwatch) -> Evaluation:
    samples = int(confusion.sum())
    watch.count(samples, 0.0)
    loss, *means = (total / max(samples, 1) for total in totals)
    return Evaluation(
        loss=loss,
        accuracy=int(confusion.trace()) / max(samples, 1),
        samples=samples,
        throughput=watch.samples_per_s,
        confusion=confusion.tolist(),
        metrics=dict(zip(metrics, means, strict=True)),
    )
