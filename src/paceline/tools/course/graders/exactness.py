"""Lesson 9: one sum, the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item

_LANES = 8
_NUMBERS = 256


def _lanes() -> list[Tensor]:
    """Gradients of eight lanes: float32, of very different sizes, as gradients are."""
    generator = torch.Generator().manual_seed(5)
    sizes = 10.0 ** torch.randint(-3, 4, (_LANES, _NUMBERS), generator=generator)
    return list(torch.randn(_LANES, _NUMBERS, generator=generator) * sizes)


def _tree(values: list[Tensor]) -> Tensor:
    while len(values) > 1:
        values = [left + right for left, right in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _left_to_right(values: list[Tensor]) -> Tensor:
    total = torch.zeros_like(values[0])
    for value in values:
        total = total + value
    return total


def _bits(tensor: Tensor) -> list[int]:
    """Floats as whole numbers: two that print alike may still differ."""
    return [int(value) for value in tensor.detach().to(torch.float32).contiguous().view(torch.int32)]


def _sum_alone(person: ModuleType, rank: int, world_size: int) -> list[int]:
    return _bits(person.tree_sum(_lanes()))


def check_tree(path: Path) -> None:
    found = on_ranks(path, 1, _sum_alone)[0]
    lanes = _lanes()
    if found == _bits(_tree(lanes)):
        return
    wide = torch.stack(lanes).double().sum(0)
    if found == _bits(wide):
        raise Failed(
            "higher-precision",
            "the sum is that of float64, rounded at the end",
            "More digits make the error smaller, not the order irrelevant, and they cost twice the bytes between "
            "ranks. Fix the order instead: then float32 is enough.",
        )
    wrong = sum(a != b for a, b in zip(found, _bits(_tree(lanes)), strict=False))
    what = f"{wrong} of {_NUMBERS} sums differ from the tree's in their last bits"
    if found == _bits(_left_to_right(lanes)):
        raise Failed(
            "left-to-right",
            f"{what}; they are those of a plain loop",
            "((a + b) + c) + d cannot be formed by two ranks that hold a, b and c, d. (a + b) + (c + d) can: add "
            "neighbours, then the neighbouring sums, until one is left.",
        )
    raise Failed(
        "another-tree", what, "Neighbours first: (0 + 1), (2 + 3), ...; then those sums with their neighbours; and on."
    )


def _own_lanes(person: ModuleType, rank: int, world_size: int) -> list[int]:
    return [int(lane) for lane in person.my_lanes(_LANES, rank, world_size)]


def check_lanes(path: Path) -> None:
    for world_size in (1, 2, 4):
        shares = on_ranks(path, world_size, _own_lanes)
        if [lane for share in shares for lane in share] == list(range(_LANES)):
            continue
        what = f"on {world_size} ranks the lanes are {shares}"
        if sorted(lane for share in shares for lane in share) == list(range(_LANES)):
            raise Failed(
                "not-neighbouring",
                what,
                "Each lane is there once, but a rank's lanes are not neighbours: it cannot form the tree's lower part.",
            )
        raise Failed("wrong-lanes", what, "Lane by lane in a row: rank 0 the first ones, rank 1 those after them.")


def _sum_together(person: ModuleType, rank: int, world_size: int) -> list[int]:
    share = _LANES // world_size
    return _bits(person.exact_sum(_lanes()[rank * share : (rank + 1) * share]))


def check_sum(path: Path) -> None:
    right = _bits(_tree(_lanes()))
    for world_size in (1, 2, 4):
        found = on_ranks(path, world_size, _sum_together)
        if all(bits == right for bits in found):
            continue
        wrong = [sum(a != b for a, b in zip(bits, right, strict=False)) for bits in found]
        what = f"on {world_size} ranks, {wrong} of {_NUMBERS} sums differ in their bits from one process's"
        if found[0] == _bits(_tree(_lanes()[: _LANES // world_size])):
            raise Failed("nothing-exchanged", what, "That is rank 0's own part: gather the others' sums.")
        if any(bits != found[0] for bits in found):
            raise Failed("ranks-disagree", what, "Not even the ranks agree: all of them must finish the same tree.")
        if world_size == 4:
            raise Failed(
                "all-reduce-order",
                f"{what}; on 1 and 2 they are right",
                "With two ranks there is only one order. With four, all_reduce adds in the order that suits its "
                "network. Gather the ranks' sums, and finish the tree yourself.",
            )
        raise Failed(
            "other-bits", what, "The ranks' sums are the tree's upper part: local tree_sum, gather, tree_sum of those."
        )


ITEMS = (
    Item("the tree's sum on one process", check_tree, ("tree_sum",)),
    Item("each rank has neighbouring lanes", check_lanes, ("my_lanes",)),
    Item("the same bits on 1, 2 and 4 ranks", check_sum, ("tree_sum", "exact_sum")),
)
