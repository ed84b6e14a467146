"""Lesson 6: the loop and the evaluation. Fill the gaps, then: paceline course check 6"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Batches = Iterable[tuple[Tensor, Tensor]]  # pictures and labels


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """One step per batch, on its mean cross-entropy."""
    ...  # TODO: there may have been an evaluation before this epoch
    for images, labels in batches:
        ...  # TODO: clear, forward, backward, step: four lines


# TODO: one line here, so that torch does not record the graph for a backward pass
def evaluate(model: nn.Module, batches: Batches) -> tuple[float, float]:
    """Mean loss and accuracy over the samples of all ranks. Numbers of samples and batch sizes may differ."""
    ...  # TODO: the model may be in training mode
    sums = torch.zeros(3, dtype=torch.float64)  # loss, right answers, samples
    for images, labels in batches:
        logits = model(images)
        sums[0] += ...  # TODO: the sum, not the mean, of the losses of this batch
        sums[1] += ...  # TODO: the number of right answers
        sums[2] += ...  # TODO: the number of samples
    ...  # TODO: sum over ranks, then divide
