"""The sum of one vector from each rank of a node, through memory they share: no sockets, no copies.

Each rank has a row to write into. When all have met, each adds up its own part of all rows, in a binary tree in the
order of ranks, and leaves it in the row of the total, which everybody reads where it lies. Every number is added up by
one rank only, in one fixed order: all ranks see the same bits, whoever came first.
"""

from __future__ import annotations

import logging
import math
from functools import partial

import torch
from torch import Tensor

from paceline.parallel.collectives import gather_texts
from paceline.parallel.meeting import Meeting, bytes_to_meet, can_meet
from paceline.world.detect import World
from paceline.world.node_memory import HEADER_BYTES, NodeMemory, share_memory

_log = logging.getLogger("paceline")
_LINE = 16  # numbers in a cache line: no two ranks write into the same one
_NUMBER_BYTES = 4


def open_node_sum(size: int, world: World) -> NodeSum | None:
    """For float32 vectors of this size; None where not all ranks share a node's memory. Collective."""
    if world.device != "cpu" or world.world_size == 1 or world.local_world_size != world.world_size:
        return None
    bytes_needed = _bytes_before(world.world_size) + (world.world_size + 1) * _padded(size) * _NUMBER_BYTES
    prepare = partial(Meeting.prepare, ranks=world.world_size)
    shared = share_memory(bytes_needed, world, partial(gather_texts, world=world), prepare)
    is_ready = shared is not None and can_meet()
    if shared is not None:
        shared.hold_place(world.local_rank)
    if not all(gather_texts("here" if is_ready else "", world)):  # everybody, or nobody
        _log.info("note: the ranks share no memory; their gradients travel by %s", world.backend)
        return None
    assert shared is not None
    return NodeSum(shared, size, world)


class NodeSum:
    """A row of each rank, and their sum."""

    def __init__(self, shared: NodeMemory, size: int, world: World) -> None:
        self._ranks = world.world_size
        self._meeting = Meeting(shared, world)
        length = _padded(size)
        start = HEADER_BYTES + bytes_to_meet(self._ranks)
        slips = torch.frombuffer(shared.memory, dtype=torch.float64, count=self._ranks * _LINE, offset=start)
        # A line of each rank: the norm of its part of the total, and room for a few numbers.
        self._norms, self._board = slips.view(self._ranks, _LINE).tensor_split([1], dim=1)
        self._norms = self._norms[:, 0]
        start = HEADER_BYTES + _bytes_before(self._ranks)
        rows = torch.frombuffer(
            shared.memory, dtype=torch.float32, count=(self._ranks + 1) * length, offset=start
        ).view(self._ranks + 1, length)
        self.mine = rows[world.rank, :size]  # what this rank adds
        self.total = rows[-1, :size]  # the same memory on all ranks: of the last sum, until all begin the next one
        part = _LINE * -(-length // _LINE // self._ranks)
        self._first, last = (min(number * part, size) for number in (world.rank, world.rank + 1))
        self._parts = list(rows[:, self._first : last])
        self._rank = world.rank

    @torch.no_grad()
    def add_up(self, *, scale: float = 1.0, measured: int = 0) -> float:
        """`total` becomes scale times the sum of all rows; returns the norm of its first `measured` numbers.

        Collective, and the same number on all ranks. The rows are used up.
        """
        self._meeting.attend()  # all rows are written, and nobody reads the last total any more
        *rows, total = self._parts
        while len(rows) > 2:  # neighbours first, as tree_sum does; this part of the rows is this rank's alone
            for left, right in zip(rows[0::2], rows[1::2], strict=False):
                left.add_(right)
            rows = rows[0::2]
        torch.add(rows[0], rows[1], out=total)
        if scale != 1.0:
            total *= scale
        if measured:
            self._norms[self._rank] = torch.linalg.vector_norm(total[: max(measured - self._first, 0)])
        self._meeting.attend()  # all of the total is there
        return math.hypot(*self._norms.tolist()) if measured else 0.0

    @torch.no_grad()
    def gather(self, numbers: Tensor) -> Tensor:
        """Up to fifteen numbers of each rank, a row for each, in float64. Collective."""
        board = self._board[:, : len(numbers)]
        board[self._rank] = numbers
        self._meeting.attend()
        everybody = board.clone()
        self._meeting.attend()  # all have read it
        return everybody

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the total. Collective."""
        self._meeting.attend()  # nobody still reads it as it was
        self._parts[-1].mul_(factor)
        self._meeting.attend()


def _padded(size: int) -> int:
    return _LINE * -(-size // _LINE)


def _bytes_before(ranks: int) -> int:
    """The meeting place, and a line of numbers of each rank."""
    return bytes_to_meet(ranks) + ranks * _LINE * 8
