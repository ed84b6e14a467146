"""Whether slices fill their tensor: no gap, no overlap. No torch.

Slices of a checkpoint come from elsewhere. A gap would leave memory that was never written in a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

# A grid over any number of dimensions needs one cut per dimension; our own slices need one.
_MOST_CUTS = 8


@dataclass(frozen=True)
class Box:
    """Where a slice lies in its tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """This box as indices into a tensor whose first element lies at `origin`."""
        return tuple(
            slice(start - zero, start - zero + size)
            for start, zero, size in zip(self.offset, origin, self.shape, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        offset = tuple(map(max, self.offset, other.offset))
        ends = [
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def lies_in(self, whole: tuple[int, ...]) -> bool:
        return all(
            start >= 0 and size >= 0 and start + size <= end
            for start, size, end in zip(self.offset, self.shape, whole, strict=True)
        )


def fill_whole(boxes: list[Box], whole: tuple[int, ...]) -> bool:
    """Whether these boxes, each inside the whole, cover every element of it exactly once.

    Disjoint boxes of the right volume do. They are told apart by straight cuts through all of them, dimension by
    dimension, in about n log n steps. Arrangements without such cuts are refused: nothing writes them.
    """
    filled = [box for box in boxes if 0 not in box.shape]
    if sum(math.prod(box.shape) for box in filled) != math.prod(whole):
        return False
    groups = [filled] if len(filled) > 1 else []
    for cut in range(_MOST_CUTS * max(len(whole), 1)):
        if not groups:
            return True
        if not whole:
            return False  # two values for a scalar
        parts = [part for group in groups for part in _cut(group, cut % len(whole))]
        groups = [part for part in parts if len(part) > 1]
    return not groups


def _cut(boxes: list[Box], dimension: int) -> Iterator[list[Box]]:
    """Groups of boxes that a plane across this dimension separates, in order."""
    group: list[Box] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.offset[dimension]):
        if group and box.offset[dimension] >= end:
            yield group
            group = []
        group.append(box)
        end = max(end, box.offset[dimension] + box.shape[dimension])
    yield group
