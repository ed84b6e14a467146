"""The order of samples, as pure functions of (seed, epoch, position).

The order does not depend on rank, worker or world size. Each rank cuts its part out of the order afterwards, so
any number of ranks sees the same samples in the same global batches.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from paceline.data.draws import draw_permutation

_ORDER, _SPLIT, _TEST = 1, 2, 3  # part of the hash, so draws for different purposes differ
SPLIT_SEED = 0  # the validation set does not depend on the seed of the run


def epoch_order(num_samples: int, seed: int, epoch: int, device: str | torch.device = "cpu") -> Tensor:
    """Positions 0..num_samples-1 in this epoch's order."""
    return draw_permutation(num_samples, _ORDER, seed, epoch, device=device)


def split_train_validation(num_samples: int, train_split: float) -> tuple[Tensor, Tensor]:
    """Sample ids of the training and the validation part, each ascending."""
    num_train = num_samples if train_split == 1 else min(max(round(num_samples * train_split), 1), num_samples - 1)
    shuffled = draw_permutation(num_samples, _SPLIT, SPLIT_SEED)
    train, validation = shuffled[:num_train], shuffled[num_train:]
    return train.sort().values, validation.sort().values


def split_train_test(num_samples: int, test_one_in: int) -> tuple[Tensor, Tensor]:
    """Sample ids of the training and the test part of data without a test set, each ascending."""
    shuffled = draw_permutation(num_samples, _TEST, SPLIT_SEED)
    num_test = num_samples // test_one_in
    return shuffled[num_test:].sort().values, shuffled[:num_test].sort().values


def even_shares(num_items: int, num_shares: int) -> list[range]:
    """Adjacent ranges that cover every item once. Their lengths differ by at most one."""
    bounds = [num_items * share // num_shares for share in range(num_shares + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]
