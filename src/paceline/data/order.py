"""The order of samples, as pure functions of (seed, epoch, position).

The order does not depend on rank, worker or world size. Each rank cuts its part out of the order afterwards, so
any number of ranks sees the same samples in the same global batches.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from paceline.data.draws import draw_permutation

# Part of the hash, so draws differ by purpose (3 to 6 and 9: sampling.py, keep.py).
_ORDER, _SPLIT, _FOLDS, _TEST, _BLOCKS = 1, 2, 7, 8, 11
_ID_BITS = 40
SPLIT_SEED = 0  # the validation set does not depend on the seed of the run


def epoch_order(num_samples: int, seed: int, epoch: int, device: str | torch.device = "cpu") -> Tensor:
    """Positions 0..num_samples-1 in this epoch's order."""
    return draw_permutation(num_samples, _ORDER, seed, epoch, device=device)


def sort_by_windows(blocks: Tensor, window: int, seed: int, epoch: int) -> Tensor:
    """For data that exceeds its cache: which entries of an order come first if only `window` blocks are read at a time.

    `blocks`: the block (data file) of each entry. The blocks are shuffled and cut into windows; inside a window the
    entries keep their order. The last window may have fewer blocks.
    """
    shuffled = draw_permutation(int(blocks.max()) + 1, _BLOCKS, seed, epoch, device=blocks.device)
    place = torch.empty_like(shuffled)
    place[shuffled] = torch.arange(len(shuffled), device=blocks.device)
    return (place[blocks] // window).sort(stable=True).indices


def draw_keys(ids: Tensor, repetitions: Tensor | int) -> Tensor:
    """A draw key is the id of a sample and, above its first 40 bits, how often the epoch has visited it before."""
    return ids + (repetitions << _ID_BITS)


def repeat_in_batches(keys: Tensor, global_batch_size: int, repeats: int) -> Tensor:
    """The draw keys of an epoch, cut into global batches: a row for each step. A last partial batch is left out.

    With repeats, a batch has the same samples several times, and an epoch as many steps as without. A repeat begins one
    sample later than the one before, so neighbours differ: they are partners in mixup and CutMix.
    """
    steps, distinct = len(keys) // global_batch_size, global_batch_size // repeats
    batches = keys[: steps * distinct].view(steps, distinct)
    if repeats == 1:
        return batches
    ids, visits = samples_of(batches), (batches >> _ID_BITS) * repeats
    return torch.cat([draw_keys(ids, visits + number).roll(-number, dims=1) for number in range(repeats)], dim=1)


def samples_of(keys: Tensor) -> Tensor:
    """The ids of the samples of draw keys."""
    return keys & ((1 << _ID_BITS) - 1)


def split_train_validation(num_samples: int, train_split: float) -> tuple[Tensor, Tensor]:
    """Sample ids of the training and the validation part, each ascending."""
    num_train = num_samples if train_split == 1 else min(max(round(num_samples * train_split), 1), num_samples - 1)
    shuffled = draw_permutation(num_samples, _SPLIT, SPLIT_SEED)
    train, validation = shuffled[:num_train], shuffled[num_train:]
    return train.sort().values, validation.sort().values


def split_folds(num_samples: int, folds: int, fold: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sample ids of the training and the validation part of a cross-validation, each ascending.

    The validation parts of the folds 1, 2, ... are disjoint, cover all samples, and differ by at most one in length.
    """
    shuffled = draw_permutation(num_samples, _FOLDS, seed)
    share = even_shares(num_samples, folds)[fold - 1]
    validation = shuffled[share.start : share.stop]
    train = torch.cat([shuffled[: share.start], shuffled[share.stop :]])
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
