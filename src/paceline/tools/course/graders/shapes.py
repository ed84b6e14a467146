"""Lesson 1: rows for any batch, and the global batch cut into the ranks' shares."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item, cause_not_known

_SIZES = (64, 10, 1)
_FEATURES = 3 * 32 * 32


def _flatten_all(person: ModuleType, rank: int, world_size: int) -> list[tuple[int, ...] | str]:
    found: list[tuple[int, ...] | str] = []
    for size in _SIZES:
        images = torch.arange(size * _FEATURES).reshape(size, 3, 32, 32)
        try:
            rows = person.flatten(images)
        except RuntimeError as error:  # torch raises it for a shape that does not fit
            found.append(f"an error: {str(error).splitlines()[0]}")
            continue
        is_mixed = tuple(rows.shape) == (size, _FEATURES) and not torch.equal(rows.flatten(), images.flatten())
        found.append(_describe_mixed(rows, images) if is_mixed else tuple(rows.shape))
    return found


def _describe_mixed(rows: Tensor, images: Tensor) -> str:
    """What is wrong with rows of the right shape. The values of a picture rise, and those of the next one follow."""
    right = images.flatten(1)
    if torch.equal(rows.sort(1).values, right):
        return "permuted inside"
    if not torch.equal(rows.flatten().sort().values, right.flatten()):
        return "other values"
    return "pictures exchanged" if torch.equal(rows[rows[:, 0].argsort()], right) else "mixed between"


def check_flatten(path: Path) -> None:
    found = on_ranks(path, 1, _flatten_all)[0]
    for size, shape in zip(_SIZES, found, strict=True):
        if shape == (size, _FEATURES):
            continue
        if shape == "permuted inside":
            raise Failed(
                "values-permuted",
                f"the rows have the right shape, but the values inside of a row are in another order ({size} pictures)",
                "A layer expects each value at its place. Only reshape: do not permute or transpose the dimensions.",
            )
        if shape == "pictures exchanged":
            raise Failed(
                "pictures-exchanged",
                f"each row is a picture, but the rows are in another order than the pictures ({size} pictures)",
                "Row i must be picture i: the labels have the order of the pictures. Only reshape.",
            )
        if shape == "other values":
            raise Failed(
                "values-changed",
                f"the rows have the right shape, but other values than the pictures ({size} pictures)",
                "flatten changes only the shape: each value of a picture is once in its row, as it was. Only reshape.",
            )
        if shape == "mixed between":
            raise Failed(
                "pictures-mixed",
                f"the rows have the right shape, but a row holds values of several pictures ({size} pictures)",
                "Row i must be picture i: the first dimension must stay first before you reshape.",
            )
        what = f"a batch of {size} pictures became {shape}, not ({size}, {_FEATURES})"
        if size != _SIZES[0]:
            raise Failed(
                "fixed-batch",
                f"{what}; a batch of {_SIZES[0]} is right",
                "A number in your code should come from the tensor. The last batch of an epoch is often "
                "smaller, and each rank's batch depends on the number of ranks. Use images.shape[0].",
            )
        raise Failed("wrong-rows", what, "One row per picture: the first dimension stays, all others become one.")


def _divide(person: ModuleType, rank: int, world_size: int) -> list[Any]:
    def outcome(global_batch_size: int, ranks: int) -> Any:
        try:
            return person.rank_batch_size(global_batch_size, ranks)
        except ValueError:
            return "ValueError"

    return [outcome(256, 1), outcome(256, 4), outcome(256, 3)]


def check_division(path: Path) -> None:
    alone, four, three = on_ranks(path, 1, _divide)[0]
    what = f"256 on 1 and 4 ranks became {alone} and {four}, not 256 and 64"
    if "ValueError" in (alone, four):
        raise Failed("equal-shares-refused", what, "Raise ValueError only if the division has a remainder.")
    if (alone, four) == (256, 256):
        raise Failed(
            "not-divided",
            what,
            "The global batch is the set of samples in one step, on any number of ranks. Divide it by world_size.",
        )
    if (alone, four) != (256, 64):
        raise cause_not_known(what, "global_batch_size // world_size.")
    if three != "ValueError":
        raise Failed(
            "leftover-samples",
            f"256 on 3 ranks became {three}: the ranks together would train on {3 * int(three)} samples per step",
            "Rounding changes the training without a message. Raise ValueError if there is a remainder.",
        )


def _scale(person: ModuleType, rank: int, world_size: int) -> list[float]:
    return [float(person.scaled_learning_rate(0.1, size)) for size in (256, 512, 64)]


def check_learning_rate(path: Path) -> None:
    found = on_ranks(path, 1, _scale)[0]
    # Products of floats may be formed in any order here.
    if all(abs(got - right) < 1e-12 for got, right in zip(found, (0.1, 0.2, 0.025), strict=True)):
        return
    what = f"for global batches of 256, 512 and 64 the rates are {found}, not [0.1, 0.2, 0.025]"
    if abs(found[1] - 0.05) < 1e-12:
        raise Failed(
            "upside-down-rate", what, "A larger batch has fewer steps with less noise, so the rate grows with it."
        )
    if found[0] == found[1] == found[2]:
        raise Failed(
            "unscaled-rate", what, "base_lr is for a global batch of 256. Multiply it by the size of the batch."
        )
    raise cause_not_known(what, "base_lr * global_batch_size / 256.")


def _share(person: ModuleType, rank: int, world_size: int) -> list[int]:
    batch = torch.arange(8).reshape(8, 1)
    return [int(value) for value in person.rank_share(batch, rank, world_size).flatten()]


def check_shares(path: Path) -> None:
    for world_size in (1, 2, 4):
        shares = on_ranks(path, world_size, _share)
        joined = [sample for share in shares for sample in share]
        if joined == list(range(8)):
            continue
        seen = ", ".join(f"rank {rank} got {share}" for rank, share in enumerate(shares))
        what = f"of the samples 0 to 7, {seen}"
        if all(share == list(range(8)) for share in shares):
            raise Failed(
                "whole-batch-everywhere",
                what,
                "Every rank does all the work. Each rank takes only its own rows.",
            )
        if all(share == shares[0] for share in shares) and world_size > 1:
            raise Failed("same-rows-everywhere", what, "The first row of a rank depends on its number: rank * size.")
        if any(sorted(share) != share for share in shares) and [sorted(s) for s in shares] == _split(world_size):
            raise Failed(
                "order-changed", what, "Each rank has its own rows, but in another order. Slice, and do not reorder."
            )
        if sorted(joined) == list(range(8)):
            raise Failed(
                "not-neighbouring",
                what,
                "Every sample is there once, but the shares in the order of ranks are not the global batch. Take "
                "neighbouring rows, rank 0 the first ones.",
            )
        lost, twice = set(range(8)) - set(joined), {s for s in joined if joined.count(s) > 1}
        raise cause_not_known(
            f"{what}; missing: {sorted(lost)}, more than once: {sorted(twice)}",
            "rank r begins at r times the size of a share, and ends where rank r + 1 begins.",
        )


def _split(world_size: int) -> list[list[int]]:
    size = 8 // world_size
    return [list(range(rank * size, (rank + 1) * size)) for rank in range(world_size)]


ITEMS = (
    Item("a batch of any size becomes rows", check_flatten, ("flatten",)),
    Item("the global batch is divided, or refused", check_division, ("rank_batch_size",)),
    Item("the learning rate follows the global batch", check_learning_rate, ("scaled_learning_rate",)),
    Item("on 1, 2 and 4 ranks the shares make up the global batch", check_shares, ("rank_batch_size", "rank_share")),
)
