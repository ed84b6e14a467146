"""Which files are fetched next, and which may be removed: from the order of an epoch and how far it has come. No torch.

Each part (training, validation, test) has an order of its own. A file is needed from its first use to its last.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.data.archives.file_cache import Outcome

_RETRY_S = 0.2


@dataclass
class _Order:
    first: dict[int, int]  # of each file: the position of its first and last sample
    last: dict[int, int]
    ends: list[int]  # the last positions, sorted
    position: int = -1  # the furthest that was read
    num_over: int = 0  # files whose last sample was read


class Schedule:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._orders: dict[str, _Order] = {}
        self._todo: list[int] = []
        self._waiting: set[int] = set()  # files without room
        self._change = threading.Condition()

    def announce(self, part: str, files: NDArray[np.int32]) -> None:
        """`files`: of every sample, in the order in which they are read."""
        found, first = np.unique(files, return_index=True)
        last = len(files) - 1 - np.unique(files[::-1], return_index=True)[1]
        numbers = found.tolist()
        with self._change:
            self._orders[part] = _Order(
                dict(zip(numbers, first.tolist(), strict=True)),
                dict(zip(numbers, last.tolist(), strict=True)),
                np.sort(last).tolist(),
            )
            self._todo = found[np.argsort(first)].tolist()
            self._waiting = set()
            self._change.notify_all()

    def passed(self, part: str, position: int) -> None:
        """The sample at this position was read. Files that are over may be removed, which makes room for others."""
        with self._change:
            order = self._orders.get(part)
            if order is None or position <= order.position:
                return
            order.position = position
            before = order.num_over
            while order.num_over < len(order.ends) and order.ends[order.num_over] <= position:
                order.num_over += 1
            if order.num_over > before and self._waiting:
                self._todo = sorted(self._waiting, key=self._first_use)
                self._waiting = set()
                self._change.notify_all()

    def take(self) -> int:
        """The next file to fetch. Waits for one."""
        with self._change:
            while not self._todo:
                self._change.wait()
            return self._todo.pop(0)

    def done(self, number: int, outcome: Outcome) -> None:
        with self._change:
            if outcome == Outcome.BUSY:
                self._change.wait(_RETRY_S)
                self._todo.append(number)
            elif outcome == Outcome.FULL:
                # What comes later has no room either, until a file is over.
                self._waiting.update(self._todo, (number,))
                self._todo = []

    def needed_before(self, number: int) -> list[int] | None:
        """Files that are still needed, and sooner than this one. They stay. None: no order is known."""
        with self._change:
            if not self._orders:
                return None
            limit = self._first_use(number)
            return [
                other
                for order in self._orders.values()
                for other, last in order.last.items()
                if last > order.position and order.first[other] <= limit
            ]

    def _first_use(self, number: int) -> int:
        return min((order.first[number] for order in self._orders.values() if number in order.first), default=0)
