"""A place where the ranks of a node wait for each other, in their shared memory.

Semaphores of the C library, one for each rank and round: in round k a rank wakes the one 2**k places further on and
waits for the one 2**k places before it, so that after log2(ranks) rounds everybody has heard of everybody. Posting and
waiting order memory, on any processor: what a rank wrote before it came is seen by all who leave.
"""

from __future__ import annotations

import ctypes
import errno
import time

from paceline.errors import PacelineError
from paceline.world.detect import World
from paceline.world.node_memory import HEADER_BYTES, NodeMemory

_LINE_BYTES = 64  # a semaphore is smaller; alone in its cache line it disturbs no other
_LOOKS = 40  # tries before going to sleep: about as long as waking up would take
_PATIENCE_S = 0.2  # then see whether those awaited are alive


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _rounds(ranks: int) -> int:
    return (ranks - 1).bit_length()


def bytes_to_meet(ranks: int) -> int:
    """How much of the shared memory a meeting place of so many ranks takes."""
    return ranks * _rounds(ranks) * _LINE_BYTES


def can_meet() -> bool:
    """Whether this system's C library has what it takes: semaphores between processes, and a clock nobody sets."""
    return hasattr(ctypes.CDLL(None), "sem_clockwait")


class Meeting:
    """All ranks of one node. Two calls are two meetings."""

    def __init__(self, shared: NodeMemory, world: World) -> None:
        """`prepare` was called by one rank before; the place is at the beginning of what is shared."""
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
        """By the rank that made the memory, before anybody meets in it."""
        library = ctypes.CDLL(None, use_errno=True)
        start = _address(shared)
        for number in range(ranks * _rounds(ranks)):
            library.sem_init(ctypes.c_void_p(start + number * _LINE_BYTES), 1, 0)

    def attend(self) -> None:
        """Return when every rank of the node has come here as often as this one. A rank that is gone raises."""
        for other, mine in self._pairs:
            self._post(other)
            self._wait_for(mine)

    def _wait_for(self, semaphore: ctypes.c_void_p) -> None:
        for _ in range(_LOOKS):
            if self._try(semaphore) == 0:
                return
        # Asleep from here on: the processor may be needed by the very rank that is awaited.
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
                raise PacelineError(f"local rank {rank} went away: remote process exited")

    def _semaphore(self, rank: int, turn: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(_address(self._shared) + (rank * _rounds(self._ranks) + turn) * _LINE_BYTES)


def _address(shared: NodeMemory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(shared.memory, HEADER_BYTES))
