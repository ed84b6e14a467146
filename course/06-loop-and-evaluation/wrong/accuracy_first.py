# hint: results-exchanged
# The accuracy where the loss belongs.
"""Lesson 6: the loop and the evaluation. Fill the gaps, then: paceline course check 6"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Batches = Iterable[tuple[Tensor, Tensor]]  # pictures and labels


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """One step per batch, on its mean cross-entropy."""
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches) -> tuple[float, float]:
    """Mean loss and accuracy over the samples of all ranks. Numbers of samples and batch sizes may differ."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)  # loss, right answers, samples
    for images, labels in batches:
        logits = model(images)
        sums[0] += cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return right / count, loss / count


# --- Diagnose a wrong mean --------------------------------------------------------------------------------------------
#
# mean_over_ranks has no gap, but its result is wrong for some inputs. Show this with an example for two ranks.

EXAMPLE = ([1.0, 2.0, 3.0], [6.0])  # the values of rank 0 and of rank 1: two lists, none of them empty
RETURNED_MEAN = 4.0  # what the defective function returns for your example
TRUE_MEAN = 3.0  # the mean of all values of your example


def mean_over_ranks(values: list[float]) -> float:
    """The mean of all values of all ranks. The ranks have different numbers of values, or none."""
    sums = torch.tensor([sum(values), len(values)], dtype=torch.float64)
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return total / count
