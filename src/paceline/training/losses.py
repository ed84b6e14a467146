"""The built-in losses: pure functions of a model's outputs and its targets, one value per sample.

Targets are classes (int64 [N]), shares of classes (float [N, classes]: mixup, several labels) or numbers (regression).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.settings.tasks import BCE, CROSS_ENTROPY, FOCAL, HUBER, L1, MSE

_SMALLEST_BASE = 1e-8  # the gradient of a power below 1 is infinite at 0


@dataclass(frozen=True)
class BuiltInLoss:
    """A loss by its name, with its options."""

    name: str = CROSS_ENTROPY
    label_smoothing: float = 0.0
    bce_threshold: float = 0.0
    focal_gamma: float = 2.0
    class_weights: Tensor | None = None

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over samples. With class weights and classes as targets, a weighted mean needs `batch_scale` too."""
        if self.name == CROSS_ENTROPY and self.class_weights is None:
            return F.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)
        return self.per_sample(outputs, targets).mean()

    def per_sample(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.name == CROSS_ENTROPY:
            options = {"weight": self.class_weights, "label_smoothing": self.label_smoothing}
            return F.cross_entropy(outputs, targets, reduction="none", **options)  # type: ignore[arg-type]
        if self.name == BCE:
            shares = self._shares(targets, outputs)
            return self._binary(outputs, shares).mean(1)
        if self.name == FOCAL:
            return self._focal(outputs, targets)
        difference = outputs - targets
        if self.name == MSE:
            return difference.square().mean(1)
        if self.name == L1:
            return difference.abs().mean(1)
        assert self.name == HUBER, self.name
        return F.huber_loss(outputs, targets, reduction="none").mean(1)

    def for_evaluation(self) -> BuiltInLoss:
        """Without weights, smoothing and threshold, so that the losses of runs can be compared."""
        return replace(self, label_smoothing=0.0, bce_threshold=0.0, class_weights=None)

    def batch_scale(self, labels: Tensor) -> Tensor | None:
        """What turns the mean of weighted losses into the weighted mean: samples / sum of their weights, per row.

        `labels`: whole global batches, one per row. None if losses are not divided by weights: shares of classes and
        binary losses are divided by the number of samples.
        """
        if self.class_weights is None or self.name == BCE or labels.dtype != torch.int64:
            return None
        sums = self.class_weights.double().to(labels.device)[labels].sum(1)
        # A batch of samples without weight has the loss 0.
        return torch.where(sums > 0, torch.full_like(sums, labels.shape[1]) / sums, torch.zeros_like(sums)).float()

    def _shares(self, targets: Tensor, outputs: Tensor) -> Tensor:
        classes = outputs.shape[1]
        shares = F.one_hot(targets, classes).to(outputs) if targets.dim() == 1 else targets.to(outputs)
        if self.label_smoothing:
            shares = shares * (1 - self.label_smoothing) + self.label_smoothing / classes
        return (shares > self.bce_threshold).to(outputs) if self.bce_threshold else shares

    def _binary(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """A value per sample and class. Class weights count for the classes that a sample has (pos_weight)."""
        return F.binary_cross_entropy_with_logits(outputs, shares, pos_weight=self.class_weights, reduction="none")

    def _focal(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.dim() == 1:
            plain = F.cross_entropy(outputs, targets, reduction="none")
            losses = self._focus(plain)
            return losses if self.class_weights is None else losses * self.class_weights[targets]
        plain = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="none")
        losses = self._focus(plain)
        if self.class_weights is not None:
            losses = losses * torch.where(targets > 0, self.class_weights, torch.ones_like(self.class_weights))
        return losses.mean(1)

    def _focus(self, cross_entropy: Tensor) -> Tensor:
        """(1 - p) ** gamma times the cross entropy, where p is the probability of the right answer."""
        wrong = -torch.expm1(-cross_entropy)
        return wrong.clamp_min(_SMALLEST_BASE) ** self.focal_gamma * cross_entropy


def balanced_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Of classes: samples / (classes * samples of the class). Of several labels: samples without / samples with it."""
    if labels.dim() == 1:
        counts = torch.bincount(labels, minlength=num_classes).double()
        return torch.full_like(counts, len(labels)) / (num_classes * counts)
    counts = labels.double().sum(0)
    return (len(labels) - counts) / counts
