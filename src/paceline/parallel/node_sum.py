"""Sums one vector from each rank of a node through shared memory, without sockets or copies.

Each rank writes its row. After a barrier, each rank adds up its own part of all rows, in a binary tree in the order of
ranks, and writes it to the row of the total. All ranks read the total in place. Each number is summed by one rank
only, in one fixed order. All ranks therefore see the same bits, independent of timing.

The barrier uses semaphores of the C library, one for each rank and round (a dissemination barrier). In round k a rank
posts the semaphore of the rank 2**k places after it and waits for its own. After log2(ranks) rounds every rank has
arrived. Posting and waiting are memory fences on any processor: writes before the barrier are visible to all ranks
after it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import time
from functools import partial

import torch
from torch import Tensor

from paceline.errors import Cause, PacelineError
from paceline.parallel.collectives import gather_texts
from paceline.runtime.detect import World
from paceline.runtime.node_memory import HEADER_BYTES, NodeMemory, share_memory

_log = logging.getLogger("paceline")
_LINE = 16  # numbers in a cache line: no two ranks write into the same one
_NUMBER_BYTES = 4
_LINE_BYTES = 64  # one semaphore per cache line, to avoid false sharing
_TRIES = 40  # tries before sleeping: they take about as long as a wake-up
_PATIENCE_S = 0.2  # then check that the other ranks are alive


def open_node_sum(size: int, world: World) -> NodeSum | None:
    """For float32 vectors of this size. None if not all ranks share memory. Collective."""
    if world.device != "cpu" or world.world_size == 1 or world.local_world_size != world.world_size:
        return None
    bytes_needed = _bytes_before(world.world_size) + (world.world_size + 1) * _padded(size) * _NUMBER_BYTES
    prepare = partial(NodeBarrier.prepare, ranks=world.world_size)
    shared = share_memory(bytes_needed, world, partial(gather_texts, world=world), prepare)
    is_ready = shared is not None and can_use_barrier()
    if shared is not None:
        shared.hold_place(world.local_rank)
    if not all(gather_texts("here" if is_ready else "", world)):  # all ranks must agree
        _log.info("note: the ranks share no memory; gradients are exchanged by %s", world.backend)
        return None
    assert shared is not None
    return NodeSum(shared, size, world)


class NodeSum:
    """One row per rank, and their sum."""

    def __init__(self, shared: NodeMemory, size: int, world: World) -> None:
        self._ranks = world.world_size
        self._barrier = NodeBarrier(shared, world)
        length = _padded(size)
        start = HEADER_BYTES + barrier_bytes(self._ranks)
        slips = torch.frombuffer(shared.memory, dtype=torch.float64, count=self._ranks * _LINE, offset=start)
        # One cache line per rank: the norm of its part of the total, and space for a few numbers.
        self._norms, self._board = slips.view(self._ranks, _LINE).tensor_split([1], dim=1)
        self._norms = self._norms[:, 0]
        start = HEADER_BYTES + _bytes_before(self._ranks)
        rows = torch.frombuffer(
            shared.memory, dtype=torch.float32, count=(self._ranks + 1) * length, offset=start
        ).view(self._ranks + 1, length)
        self.mine = rows[world.rank, :size]  # what this rank adds
        self.total = rows[-1, :size]  # the same memory on all ranks; valid until the next sum begins
        part = _LINE * -(-length // _LINE // self._ranks)
        self._first, last = (min(number * part, size) for number in (world.rank, world.rank + 1))
        self._parts = list(rows[:, self._first : last])
        self._rank = world.rank

    @torch.no_grad()
    def add_up(self, *, scale: float = 1.0, measured: int = 0) -> float:
        """Set `total` to scale times the sum of all rows. Return the norm of its first `measured` numbers.

        Collective. All ranks get the same norm. The rows are overwritten.
        """
        self._barrier.wait()  # all rows are written, and no rank reads the last total any more
        *rows, total = self._parts
        while len(rows) > 2:  # adjacent pairs first, as in tree_sum; only this rank uses this part of the rows
            for left, right in zip(rows[0::2], rows[1::2], strict=False):
                left.add_(right)
            rows = rows[0::2]
        torch.add(rows[0], rows[1], out=total)
        if scale != 1.0:
            total *= scale
        if measured:
            self._norms[self._rank] = torch.linalg.vector_norm(total[: max(measured - self._first, 0)])
        self._barrier.wait()  # the total is complete
        return math.hypot(*self._norms.tolist()) if measured else 0.0

    @torch.no_grad()
    def gather(self, numbers: Tensor) -> Tensor:
        """Up to fifteen numbers per rank, one row per rank, in float64. Collective."""
        board = self._board[:, : len(numbers)]
        board[self._rank] = numbers
        self._barrier.wait()
        all_rows = board.clone()
        self._barrier.wait()  # all have read it
        return all_rows

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply the total. Collective."""
        self._barrier.wait()  # no rank still reads the old values
        self._parts[-1].mul_(factor)
        self._barrier.wait()


def _padded(size: int) -> int:
    return _LINE * -(-size // _LINE)


def _bytes_before(ranks: int) -> int:
    """Bytes of the barrier and of one cache line per rank."""
    return barrier_bytes(ranks) + ranks * _LINE * 8


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _rounds(ranks: int) -> int:
    return (ranks - 1).bit_length()


def barrier_bytes(ranks: int) -> int:
    """The shared memory that a barrier of this many ranks takes."""
    return ranks * _rounds(ranks) * _LINE_BYTES


def can_use_barrier() -> bool:
    """Whether the C library has semaphores between processes that wait on the monotonic clock."""
    return hasattr(ctypes.CDLL(None), "sem_clockwait")


class NodeBarrier:
    """A barrier over all ranks of one node. Each call of `wait` is one barrier."""

    def __init__(self, shared: NodeMemory, world: World) -> None:
        """One rank has called `prepare` before. The semaphores are at the beginning of the shared memory."""
        self._shared = shared
        self._rank, self._ranks = world.local_rank, world.local_world_size
        library = ctypes.CDLL(None, use_errno=True)
        self._post, self._try, self._wait = library.sem_post, library.sem_trywait, library.sem_clockwait
        self._pairs = [
            (self._semaphore((self._rank + 2**turn) % self._ranks, turn), self._semaphore(self._rank, turn))
            for turn in range(_rounds(self._ranks))
        ]
        self._deadline = _Timespec()

    @staticmethod
    def prepare(shared: NodeMemory, ranks: int) -> None:
        """Called by the rank that made the memory, before any rank waits."""
        library = ctypes.CDLL(None, use_errno=True)
        start = _address(shared)
        for number in range(ranks * _rounds(ranks)):
            library.sem_init(ctypes.c_void_p(start + number * _LINE_BYTES), 1, 0)

    def wait(self) -> None:
        """Return when every rank of the node has called this as often as this one. Raises if a rank has exited."""
        for other, mine in self._pairs:
            self._post(other)
            self._wait_for(mine)

    def _wait_for(self, semaphore: ctypes.c_void_p) -> None:
        for _ in range(_TRIES):
            if self._try(semaphore) == 0:
                return
        # Sleep from here on: the awaited rank may need this processor.
        while True:
            until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(_PATIENCE_S * 1e9)
            self._deadline.seconds, self._deadline.nanoseconds = divmod(until, 10**9)
            if self._wait(semaphore, time.CLOCK_MONOTONIC, ctypes.byref(self._deadline)) == 0:
                return
            if ctypes.get_errno() not in (errno.ETIMEDOUT, errno.EINTR):
                raise OSError(ctypes.get_errno(), "the ranks of this node cannot wait for each other")
            self._look_for_the_lost()

    def _look_for_the_lost(self) -> None:
        for rank in range(self._ranks):
            if rank != self._rank and not self._shared.is_held(rank):
                raise PacelineError(f"local rank {rank} has exited", cause=Cause.PEER_LOST)

    def _semaphore(self, rank: int, turn: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(_address(self._shared) + (rank * _rounds(self._ranks) + turn) * _LINE_BYTES)


def _address(shared: NodeMemory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(shared.memory, HEADER_BYTES))
