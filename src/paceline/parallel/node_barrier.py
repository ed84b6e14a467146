"""A barrier for the ranks of a node, in their shared memory.

It uses semaphores of the C library, one for each rank and round (a dissemination barrier). In round k a rank posts the
semaphore of the rank 2**k places after it and waits for its own. After log2(ranks) rounds every rank has arrived.
Posting and waiting are memory fences on any processor: writes before the barrier are visible to all ranks after it.
"""

from __future__ import annotations

import ctypes
import errno
import time

from paceline.errors import Cause, PacelineError
from paceline.runtime.detect import World
from paceline.runtime.node_memory import HEADER_BYTES, NodeMemory

_LINE_BYTES = 64  # one semaphore per cache line, to avoid false sharing
_LOOKS = 40  # tries before sleeping: they take about as long as a wake-up
_PATIENCE_S = 0.2  # then check that the other ranks are alive


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
        for _ in range(_LOOKS):
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
