"""The built-in metrics, compared with implementations of their definitions."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from paceline.training.scores import average_precision, score_classes, score_labels, score_numbers, score_sums


def average_precision_by_definition(scores: list[float], truths: list[bool]) -> float:
    """Precision and recall at every threshold, from the highest score to the lowest. The area is a sum of steps."""
    points = [(0.0, 1.0)]
    for threshold in sorted(set(scores), reverse=True):
        chosen = [truth for score, truth in zip(scores, truths, strict=True) if score >= threshold]
        points.append((sum(chosen) / sum(truths), sum(chosen) / len(chosen)))
    return sum((recall - before) * precision for (before, _), (recall, precision) in pairwise(points))


@pytest.mark.parametrize("levels", [3, 10, 10_000])
def test_average_precision_with_and_without_equal_scores(levels: int) -> None:
    drawn = random.Random(levels)
    for size in (1, 2, 5, 40, 200):
        scores = [drawn.randrange(levels) / levels for _ in range(size)]
        truths = [drawn.random() < 0.3 for _ in range(size)]
        truths[drawn.randrange(size)] = True
        found = average_precision(np.array(scores, dtype=np.float32), np.array(truths))
        # The sums are the same, added in another order.
        assert found == pytest.approx(average_precision_by_definition(scores, truths), rel=1e-12)


def test_average_precision_of_known_cases() -> None:
    def of(*truths: int) -> float | None:
        return average_precision(-np.arange(len(truths), dtype=np.float32), np.array(truths, dtype=bool))

    assert of(1, 1, 0, 0) == 1.0
    assert of(0, 0, 0, 1) == 0.25
    assert of(1, 0, 1, 0) == pytest.approx((1 + 2 / 3) / 2)
    assert of(0, 0, 0) is None


def test_metrics_of_several_labels() -> None:
    outputs = torch.tensor([[2.0, -1.0, 3.0], [-1.0, -2.0, 1.0], [1.0, 1.0, 2.0], [-3.0, 2.0, 5.0]])
    targets = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    found = score_labels(outputs, targets)
    # Class 0: both first. Class 1: ranks 1 and 4 of (2, 1, -1, -2). Class 2 has no samples.
    assert found.per_class["average_precision"] == [1.0, (1 + 2 / 4) / 2, None]
    assert found.metrics["map"] == (1.0 + 0.75) / 2
    assert found.per_class["f1"] == [1.0, 2 * 1 / (2 + 2), 0.0]
    assert found.accuracy == 0.0  # the third label is always wrong
    assert score_labels(outputs[:, :2], targets[:, :2]).accuracy == 2 / 4


def test_metrics_of_classes() -> None:
    confusion = torch.tensor([[3, 1, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    found = score_classes(confusion, [9.0])
    assert found.accuracy == 6 / 10
    assert found.per_class["accuracy"] == [3 / 4, 2 / 4, None, 1 / 2]
    assert found.per_class["precision"] == [3 / 5, 2 / 4, None, 1.0]
    assert found.per_class["f1"] == [6 / 9, 4 / 8, None, 2 / 3]
    assert found.metrics["balanced_accuracy"] == pytest.approx((3 / 4 + 2 / 4 + 1 / 2) / 3)
    assert found.metrics["f1"] == pytest.approx((6 / 9 + 4 / 8 + 2 / 3) / 3)
    assert found.metrics["top5"] == 0.9
    assert "top5" not in score_classes(confusion, []).metrics


def test_top5_counts_samples_whose_class_is_among_the_five_largest() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.rand(50, 9, generator=generator)
    labels = torch.randint(0, 9, (50,), generator=generator)
    rows = zip(outputs.tolist(), labels.tolist(), strict=True)
    expected = sum(label in sorted(range(9), key=lambda place, row=row: -row[place])[:5] for row, label in rows)  # type: ignore[misc]
    assert [int(value) for value in score_sums("single-label", outputs, labels)] == [expected]
    assert score_sums("single-label", outputs[:, :5], labels) == []


def test_metrics_of_numbers() -> None:
    outputs, targets = torch.tensor([[1.0, 5.0], [2.0, 9.0]]), torch.tensor([[2.0, 5.0], [2.0, 6.0]])
    sums = [float(value) for value in score_sums("regression", outputs, targets)]
    found = score_numbers(sums, 2)
    assert found.accuracy is None
    assert found.metrics == {"mae": (1 + 0 + 0 + 3) / 4, "rmse": math.sqrt((1 + 9) / 4)}
    assert found.per_class == {"mae": [0.5, 1.5]}
