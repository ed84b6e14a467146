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


# --- Diagnose a wrong mean --------------------------------------------------------------------------------------------
#
# mean_over_ranks has no gap, but its result is wrong for some inputs. Show this with an example for two ranks.

EXAMPLE = (..., ...)  # TODO: the values of rank 0 and of rank 1: two lists, none of them empty
RETURNED_MEAN = ...  # TODO: what the defective function returns for your example
TRUE_MEAN = ...  # TODO: the mean of all values of your example


def mean_over_ranks(values: list[float]) -> float:
    """The mean of all values of all ranks. The ranks have different numbers of values, or none. TODO: repair it."""
    mean = torch.tensor(sum(values) / len(values), dtype=torch.float64)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
