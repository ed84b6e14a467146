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
from paceline.models.checks import require_logits
from paceline.parallel.apply import ParallelModel, autocast
from paceline.parallel.collectives import sum_lanes, sum_over_ranks
from paceline.runtime.detect import World
from paceline.settings.tasks import MULTI_LABEL, SINGLE_LABEL
from paceline.training.examples import Examples
from paceline.training.objective import Objective
from paceline.training.scores import (
    CollectedOutputs,
    PerClass,
    num_score_sums,
    score_classes,
    score_labels,
    score_numbers,
    score_sums,
)

EVALUATION_SCHEMA = 1  # increased when a field of evaluation.json changes its meaning or is removed


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation, over all ranks."""

    loss: float
    accuracy: float | None  # of classes; of several labels: all of a sample's are right; None for a regression
    samples: int
    throughput: float
    confusion: list[list[int]]  # rows: true class, columns: predicted class; empty for other tasks
    metrics: dict[str, float] = field(default_factory=dict)  # the task's other metrics, then the user's own
    per_class: dict[str, PerClass] = field(default_factory=dict)  # values of each class, or of each number

    @property
    def seconds(self) -> float:
        return self.samples / self.throughput if self.throughput else 0.0

    def values(self) -> dict[str, float]:
        """Every metric by name."""
        accuracy = {} if self.accuracy is None else {"accuracy": self.accuracy}
        return {"loss": self.loss, **accuracy, **self.metrics}

    def by_class(self, classes: tuple[str, ...]) -> dict[str, Any]:
        """The part of an evaluation that needs the names of the classes, for JSON."""
        return {
            "samples": self.samples,
            **{f"class_{name}": dict(zip(classes, values, strict=True)) for name, values in self.per_class.items()},
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
    task, own = objective.task, 1 + len(objective.metrics)
    columns = own + num_score_sums(task, num_classes)
    sums = torch.zeros(shares_per_rank, columns, dtype=torch.float64, device=world.device)
    cells = num_classes * num_classes if task == SINGLE_LABEL else 0
    confusion = torch.zeros(cells, dtype=torch.int64, device=world.device)
    collected, counted = CollectedOutputs(task, num_classes), torch.zeros(1, dtype=torch.int64, device=world.device)
    model.module.eval()
    batches = loader.evaluation_batches(batch_size, shares_per_rank=shares_per_rank)

    def forward(inputs: Tensor) -> Tensor:
        return require_logits(model.module(inputs), len(inputs), num_classes, type(model.module).__name__)

    try:
        for batch in itertools.islice(batches, max_batches):
            if on_batch is not None:
                on_batch()
            with autocast(model, world):
                logits = average_over_views(forward, batch.inputs, views).float()
            if batch.is_counted:
                scores = score_sums(task, logits, batch.labels)
                sums[batch.share] += torch.cat([objective.sums(logits, batch.labels), *(s[None] for s in scores)])
                counted += len(batch.labels)
                collected.add(logits, batch.labels)
                if task == SINGLE_LABEL:
                    places = batch.labels * num_classes + logits.argmax(1)
                    confusion += torch.bincount(places, minlength=cells)
                if examples is not None:
                    examples.collect(batch.inputs, batch.labels, logits)
    finally:
        model.module.train()
        model.release_gathered()
    samples = int(sum_over_ranks(counted, world).item())
    totals = sum_lanes(sums, world).tolist()
    watch.count(samples, 0.0)
    matrix: list[list[int]] = []
    if task == SINGLE_LABEL:
        table = sum_over_ranks(confusion, world).view(num_classes, num_classes).cpu()
        found, matrix = score_classes(table, totals[own:]), table.tolist()
    elif task == MULTI_LABEL:
        found = score_labels(*collected.gather(world))
    else:
        found = score_numbers(totals[own:], samples)
    loss, *means = (total / max(samples, 1) for total in totals[:own])
    return Evaluation(
        loss=loss,
        accuracy=found.accuracy,
        samples=samples,
        throughput=watch.samples_per_s,
        confusion=matrix,
        metrics={**found.metrics, **dict(zip(objective.metrics, means, strict=True))},
        per_class=found.per_class,
    )


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
