"""Lesson 9: one sum, the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed, Item, cause_not_known, ranks_text

_LANES = 8
_NUMBERS = 256
_NO_MORE_DIGITS = (
    "More digits make the rounding errors smaller, but the order still matters, and the ranks send twice the bytes. "
    "Fix the order instead: then float32 is enough."
)


def _lanes() -> list[Tensor]:
    """Gradients of eight lanes: float32, of very different sizes, like real gradients."""
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


def _halves(values: list[Tensor]) -> Tensor:
    """A tree that adds the first half to the second: 0 + 4, 1 + 5, ..."""
    while len(values) > 1:
        half = len(values) // 2
        values = [left + right for left, right in zip(values[:half], values[half:], strict=True)]
    return values[0]


def _wide_sums(parts: list[list[Tensor]]) -> list[list[Tensor]]:
    """The ranks' sums for a sum over ranks in float64, with own lanes in float32 or in float64."""
    return [[_tree(part).double() for part in parts], [torch.stack(part).double().sum(0) for part in parts]]


def _is_sum(bits: list[int]) -> bool:
    """Whether these are the sums of all lanes, up to rounding."""
    lanes = torch.stack(_lanes()).double()
    if len(bits) != _NUMBERS:
        return False
    found = torch.tensor(bits, dtype=torch.int32).view(torch.float32).double()
    return bool(((found - lanes.sum(0)).abs() <= 1e-5 * lanes.abs().sum(0)).all())


def _bits(tensor: Tensor) -> list[int]:
    """The bits of floats as integers: two floats that print alike may differ."""
    return [int(value) for value in tensor.detach().to(torch.float32).contiguous().view(torch.int32)]


def _sum_alone(person: ModuleType, rank: int, world_size: int) -> list[int]:
    return _bits(person.tree_sum(_lanes()))


def check_tree(path: Path) -> None:
    found = on_ranks(path, 1, _sum_alone)[0]
    lanes = _lanes()
    if found == _bits(_tree(lanes)):
        return
    if not _is_sum(found):
        raise Failed(
            "not-the-sum",
            "the result is not the sum of all lanes, not even approximately",
            "Every value must be added once. Does the loop run until one value is left, and add all neighbours?",
        )
    wide = torch.stack(lanes).double().sum(0)
    if found == _bits(wide):
        raise Failed("higher-precision", "the sum is that of float64, rounded at the end", _NO_MORE_DIGITS)
    wrong = sum(a != b for a, b in zip(found, _bits(_tree(lanes)), strict=False))
    what = f"{wrong} of {_NUMBERS} sums differ from the tree's in their last bits"
    if found == _bits(_left_to_right(lanes)):
        raise Failed(
            "left-to-right",
            f"{what}; they are those of a loop from left to right",
            "((a + b) + c) + d cannot be formed by two ranks that hold a, b and c, d. (a + b) + (c + d) can: add "
            "neighbours, then the neighbouring sums, until one is left.",
        )
    if found == _bits(_halves(lanes)):
        raise Failed(
            "halves-added",
            f"{what}; they are those of a tree that adds 0 + 4, 1 + 5, ...",
            "A rank with the lanes 0 to 3 cannot form these sums. Add neighbours: 0 + 1, 2 + 3, ...",
        )
    raise cause_not_known(what, "neighbours first: (0 + 1), (2 + 3), ...; then these sums with their neighbours.")


def _own_lanes(person: ModuleType, rank: int, world_size: int) -> list[int]:
    return [int(lane) for lane in person.my_lanes(_LANES, rank, world_size)]


def check_lanes(path: Path) -> None:
    for world_size in (1, 2, 4):
        shares = on_ranks(path, world_size, _own_lanes)
        if [lane for share in shares for lane in share] == list(range(_LANES)):
            continue
        what = f"on {ranks_text(world_size)} the lanes are {shares}"
        if sorted(lane for share in shares for lane in share) == list(range(_LANES)):
            raise Failed(
                "not-neighbouring",
                what,
                "Each lane is there once, but a rank's lanes are not neighbours, so it holds no part of the tree.",
            )
        if world_size > 1 and all(share == list(range(_LANES)) for share in shares):
            raise Failed("all-lanes-everywhere", what, "Each rank takes only its own lanes.")
        raise cause_not_known(what, "rank 0 has the first lanes, rank 1 those after them, and so on; each lane once.")


def _sum_together(person: ModuleType, rank: int, world_size: int) -> tuple[list[int], bool]:
    """The bits, and whether torch did the sum over ranks."""
    reductions: list[str] = []
    for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"):
        original = getattr(dist, name)

        def record(*arguments: object, name: str = name, original: Any = original, **options: object) -> Any:
            reductions.append(name)
            return original(*arguments, **options)

        setattr(dist, name, record)
    share = _LANES // world_size
    bits = _bits(person.exact_sum(_lanes()[rank * share : (rank + 1) * share]))
    return bits, bool(reductions)


def check_sum(path: Path) -> None:
    right = _bits(_tree(_lanes()))
    for world_size in (1, 2, 4):
        reports = on_ranks(path, world_size, _sum_together)
        found = [bits for bits, _ in reports]
        if any(bits != right for bits in found):
            raise _explain_sum(found, has_reduction=any(is_reduced for _, is_reduced in reports))


def _explain_sum(found: list[list[int]], has_reduction: bool) -> Failed:
    world_size = len(found)
    share = _LANES // world_size
    parts = [_lanes()[rank * share : (rank + 1) * share] for rank in range(world_size)]
    sums = [_tree(part) for part in parts]
    right = _bits(_tree(_lanes()))
    wrong = [sum(a != b for a, b in zip(bits, right, strict=False)) for bits in found]
    what = f"on {ranks_text(world_size)}, {wrong} of {_NUMBERS} sums differ in their bits from those of one process"
    if world_size > 1 and found == [_bits(part) for part in sums]:
        return Failed("nothing-exchanged", what, "Each rank returns its own part. Gather the sums of the other ranks.")
    if not all(_is_sum(bits) for bits in found):
        return Failed(
            "not-the-sum",
            f"{what}; the results are not even approximately the sum of all lanes",
            "Is `gathered` filled by all_gather before it is used, and is each rank's sum added once?",
        )
    if any(bits != found[0] for bits in found):
        return Failed("ranks-disagree", what, "The ranks return different bits: all of them must finish the same tree.")
    if has_reduction:
        return Failed(
            "all-reduce-order",
            what,
            "Torch added the ranks' sums (all_reduce or reduce). With two ranks there is one order; with four, the "
            "order depends on the algorithm. Gather the ranks' sums, and finish the tree yourself.",
        )
    if world_size > 1 and any(found[0] == _bits(_tree(wide).float()) for wide in _wide_sums(parts)):
        return Failed("higher-precision", what, _NO_MORE_DIGITS)
    loops = (
        _left_to_right,
        lambda part: torch.stack(part).cumsum(0)[-1],
        lambda part: torch.stack(part).sum(0),
        lambda part: torch.stack(part).double().sum(0).float(),
    )
    if any(found[0] == _bits(_tree([loop(part) for part in parts])) for loop in loops):
        return Failed(
            "own-lanes-without-tree",
            what,
            "The lanes of a rank are added one after the other, or with more digits (float64, cumsum). Use tree_sum: "
            "if the order is fixed, float32 is enough.",
        )
    if found[0] == _bits(_left_to_right(sums)):
        return Failed(
            "loop-over-ranks", what, "The ranks' sums are added from left to right. Use tree_sum for them too."
        )
    orders = [list(order) for order in itertools.permutations(sums)]
    if any(found[0] == _bits(_tree(order)) for order in [*orders, list(torch.stack(sums).sort(0).values)]):
        return Failed(
            "another-order-of-ranks",
            what,
            "The ranks' sums are added by a tree, but in another order. all_gather returns them in the order of ranks: "
            "leave them so.",
        )
    return cause_not_known(what, "tree_sum of the own lanes, all_gather, tree_sum of what was gathered.")


ITEMS = (
    Item("the tree's sum on one process", check_tree, ("tree_sum",)),
    Item("each rank has neighbouring lanes", check_lanes, ("my_lanes",)),
    Item("the same bits on 1, 2 and 4 ranks", check_sum, ("tree_sum", "exact_sum")),
)
