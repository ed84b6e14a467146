"""The built-in losses, compared with formulas in plain Python, sample by sample."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from paceline.data.mixing import Mixing
from paceline.training.losses import BuiltInLoss, balanced_weights
from paceline.training.objective import Objective

# Another order of additions changes the last bits.
assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
CLASSES, SAMPLES = 5, 24
OUTPUTS = torch.randn(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(1)) * 3
LABELS = torch.randint(0, CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(2))
SEVERAL = (torch.rand(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(3)) < 0.4).float()
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0])


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def binary(output: float, target: float, weight: float = 1.0) -> float:
    probability = sigmoid(output)
    return -(weight * target * math.log(probability) + (1 - target) * math.log(1 - probability))


def log_softmax(row: list[float]) -> list[float]:
    total = math.log(sum(math.exp(value) for value in row))
    return [value - total for value in row]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_binary_cross_entropy_of_soft_targets(smoothing: float, threshold: float) -> None:
    mixing = Mixing(0.8, 0.0, 0.5, CLASSES)
    bits = torch.randint(-(2**62), 2**62, (SAMPLES,), generator=torch.Generator().manual_seed(4))
    _, shares = mixing.mix(torch.zeros(SAMPLES, 3, 4, 4), LABELS, bits)
    expected = []
    for outputs, targets in zip(OUTPUTS.tolist(), shares.tolist(), strict=True):
        smooth = [target * (1 - smoothing) + smoothing / CLASSES for target in targets]
        hard = [float(target > threshold) if threshold else target for target in smooth]
        expected.append(sum(map(binary, outputs, hard)) / CLASSES)
    loss = BuiltInLoss("bce", label_smoothing=smoothing, bce_threshold=threshold)
    assert_close(loss.per_sample(OUTPUTS, shares), torch.tensor(expected))


def test_binary_cross_entropy_of_classes_equals_that_of_their_one_hot_targets() -> None:
    loss = BuiltInLoss("bce", label_smoothing=0.1)
    shares = F.one_hot(LABELS, CLASSES).float()
    assert torch.equal(loss.per_sample(OUTPUTS, LABELS), loss.per_sample(OUTPUTS, shares))


def test_class_weights_of_bce_apply_to_the_labels_of_a_sample() -> None:
    expected = [
        sum(map(binary, outputs, targets, WEIGHTS.tolist())) / CLASSES
        for outputs, targets in zip(OUTPUTS.tolist(), SEVERAL.tolist(), strict=True)
    ]
    found = BuiltInLoss("bce", class_weights=WEIGHTS).per_sample(OUTPUTS, SEVERAL)
    assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_of_classes(gamma: float) -> None:
    expected = []
    for row, label in zip(OUTPUTS.tolist(), LABELS.tolist(), strict=True):
        log_probability = log_softmax(row)[label]
        expected.append(-((1 - math.exp(log_probability)) ** gamma) * log_probability)
    found = BuiltInLoss("focal", focal_gamma=gamma).per_sample(OUTPUTS, LABELS)
    assert_close(found, torch.tensor(expected))
    if gamma == 0:
        assert_close(found, F.cross_entropy(OUTPUTS, LABELS, reduction="none"))


def test_focal_loss_of_several_labels() -> None:
    expected = []
    for outputs, targets in zip(OUTPUTS.tolist(), SEVERAL.tolist(), strict=True):
        right = [sigmoid(o) if target else 1 - sigmoid(o) for o, target in zip(outputs, targets, strict=True)]
        expected.append(sum(-((1 - p) ** 2) * math.log(p) for p in right) / CLASSES)
    found = BuiltInLoss("focal").per_sample(OUTPUTS, SEVERAL)
    assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("gamma", [0.3, 2.0])
def test_focal_loss_has_a_gradient_for_certain_predictions(gamma: float) -> None:
    outputs = torch.tensor([[200.0, -200.0]], requires_grad=True)
    BuiltInLoss("focal", focal_gamma=gamma).mean(outputs, torch.tensor([0])).backward()
    assert outputs.grad is not None
    assert bool(outputs.grad.isfinite().all())


def test_losses_of_numbers() -> None:
    targets = torch.randn(SAMPLES, CLASSES, generator=torch.Generator().manual_seed(5))
    errors = OUTPUTS - targets
    huber = torch.where(errors.abs() < 1, errors.square() / 2, errors.abs() - 0.5)
    for name, expected in {"mse": errors.square(), "l1": errors.abs(), "huber": huber}.items():
        assert_close(BuiltInLoss(name).per_sample(OUTPUTS, targets), expected.mean(1))


@pytest.mark.parametrize("name", ["cross-entropy", "focal"])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_a_weighted_mean_does_not_depend_on_the_microbatches(name: str, parts: int) -> None:
    """Microbatches with few or heavy classes: the mean of their weighted means is not the weighted mean."""
    order = LABELS.argsort()  # parts with different classes
    outputs, labels = OUTPUTS[order], LABELS[order]
    objective = Objective(loss=BuiltInLoss(name, class_weights=WEIGHTS))
    scale = objective.batch_scale(labels[None])
    assert scale is not None
    cut = zip(outputs.tensor_split(parts), labels.tensor_split(parts), strict=True)
    means = [objective.mean_loss(*part, scale[0]) for part in cut]
    weights = WEIGHTS[labels]
    plain = BuiltInLoss(name).per_sample(outputs, labels)
    assert_close(torch.stack(means).mean(), (plain * weights).sum() / weights.sum())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weighted_cross_entropy_equals_torchs(smoothing: float) -> None:
    loss = BuiltInLoss(label_smoothing=smoothing, class_weights=WEIGHTS)
    objective = Objective(loss=loss)
    scales = objective.batch_scale(LABELS[None])
    assert scales is not None
    expected = F.cross_entropy(OUTPUTS, LABELS, weight=WEIGHTS, label_smoothing=smoothing)
    assert_close(objective.mean_loss(OUTPUTS, LABELS, scales[0]), expected)
    shares = F.one_hot(LABELS, CLASSES).float() * 0.7 + 0.3 / CLASSES
    assert objective.batch_scale(shares[None]) is None  # torch divides soft targets by the number of samples
    expected = F.cross_entropy(OUTPUTS, shares, weight=WEIGHTS, label_smoothing=smoothing)
    assert_close(objective.mean_loss(OUTPUTS, shares), expected)


def test_a_batch_of_classes_with_weight_zero_has_no_loss() -> None:
    objective = Objective(loss=BuiltInLoss(class_weights=WEIGHTS))
    labels = torch.full((4,), 3)
    scales = objective.batch_scale(labels[None])
    assert scales is not None
    assert objective.mean_loss(OUTPUTS[:4], labels, scales[0]).item() == 0.0


def test_without_options_cross_entropy_is_bit_equal_to_torchs() -> None:
    assert torch.equal(BuiltInLoss().mean(OUTPUTS, LABELS), F.cross_entropy(OUTPUTS, LABELS))
    assert Objective().batch_scale(LABELS[None]) is None


def test_evaluation_uses_no_weights_and_no_smoothing() -> None:
    loss = BuiltInLoss(label_smoothing=0.3, class_weights=WEIGHTS)
    sums = Objective(loss=loss).sums(OUTPUTS, LABELS)
    assert torch.equal(sums, F.cross_entropy(OUTPUTS, LABELS, reduction="none").double().sum()[None])


def test_balanced_weights() -> None:
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    assert balanced_weights(labels, 3).tolist() == [10 / 18, 10 / 9, 10 / 3]
    several = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert balanced_weights(several, 2).tolist() == [1 / 3, 3.0]
