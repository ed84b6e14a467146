"""Reads samples ahead of the training loop in one background thread and, for a GPU, copies them asynchronously.

The thread reads a share into page-locked memory and starts the copy on a separate CUDA stream. The GPU computes on one
batch while the next ones arrive. The loop's stream waits for the copy; the loop itself does not. `ReadingWatch`
measures how long the loop waits for the thread and warns once if that is a large part of its time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.data.crops import Crops
from paceline.data.dataset import Dataset

_log = logging.getLogger("paceline")

_AHEAD = 2  # shares that are read while the loop works on one
_MOST_WAITING = 0.2  # fraction of the loop's time
_WINDOW_S = 10.0
_LEAST_SHARES = 10  # per window: one slow read does not trigger the warning


@runtime_checkable
class ReadsInto(Protocol):
    """A data set of uint8 pictures that can read into given memory."""

    sample_shape: tuple[int, ...]

    def read_into(self, indices: Tensor, samples: Tensor) -> None: ...


@runtime_checkable
class ReadsCrops(Protocol):
    """A data set that takes random crops of whole pictures while it decodes them."""

    def read_crops(self, indices: Tensor, crops: Crops) -> Tensor: ...

    def read_crops_into(self, indices: Tensor, crops: Crops, samples: Tensor) -> None: ...


def read_samples(dataset: Dataset, ids: Tensor, crops: Crops | None) -> Tensor:
    """Samples, or crops of them if the data set takes the crops."""
    if crops is None:
        return dataset.read(ids)
    assert isinstance(dataset, ReadsCrops)
    return dataset.read_crops(ids, crops)


class ReadingWatch:
    """Adds up how long the loop waits for data. Warns once if that is a large part of its time."""

    def __init__(self, dataset: Dataset) -> None:
        self._remedy = getattr(dataset, "if_slow", "a faster read() of the data set")
        self._is_told = False
        self._waited_s, self._loop_s, self._shares = 0.0, 0.0, 0

    def look(self, waited_s: float, loop_s: float) -> None:
        """Record that the loop waited `waited_s` of the `loop_s` seconds since the last share."""
        self._waited_s += waited_s
        self._loop_s += loop_s
        self._shares += 1
        if self._is_told or self._loop_s < _WINDOW_S or self._shares < _LEAST_SHARES:
            return
        waiting = self._waited_s / self._loop_s
        if waiting > _MOST_WAITING:
            self._is_told = True
            _log.warning("warning: %.0f %% of the time is spent waiting for data; try %s", 100 * waiting, self._remedy)
        self._waited_s, self._loop_s, self._shares = 0.0, 0.0, 0


def read_ahead(
    dataset: Dataset,
    shares: Sequence[Tensor],
    device: str,
    watch: ReadingWatch,
    crops: Callable[[int], Crops | None] = lambda number: None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Sample ids and their samples on the device, share by share. `crops` gives the crops of a share by its number."""
    reader = _Reader(dataset, device)
    coming: deque[Future[_Arrival]] = deque()
    todo = enumerate(shares)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as thread:
        try:
            last = None  # the first share is not measured: it cannot be read ahead
            for ids in shares:
                for number, later in islice(todo, 1 + _AHEAD - len(coming)):
                    coming.append(thread.submit(reader.read, later, crops(number)))
                asked = time.perf_counter()
                arrival = coming.popleft().result()
                now = time.perf_counter()
                if last is not None:
                    watch.look(now - asked, now - last)
                last = now
                yield ids, arrival.take()
        finally:
            for future in coming:
                future.cancel()


@dataclass(frozen=True)
class _Arrival:
    """Samples that are in memory, or whose copy is under way on the reader's stream."""

    samples: Tensor
    is_there: torch.cuda.Event | None

    def take(self) -> Tensor:
        """Make the current stream wait for the copy. The memory is not reused before this stream is done with it."""
        if self.is_there is not None:
            stream = torch.cuda.current_stream(self.samples.device)
            stream.wait_event(self.is_there)
            self.samples.record_stream(stream)
        return self.samples


class _Reader:
    """Runs in the background thread."""

    def __init__(self, dataset: Dataset, device: str) -> None:
        self._dataset = dataset
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.startswith("cuda") else None

    def read(self, ids: Tensor, crops: Crops | None) -> _Arrival:
        if self._stream is None:
            return _Arrival(read_samples(self._dataset, ids, crops), None)
        with torch.cuda.stream(self._stream):
            # torch owns the page-locked memory and reuses it only after the copy out of it is done.
            samples = self._read_locked(ids, crops).to(self._device, non_blocking=True)
            is_there = torch.cuda.Event()
            is_there.record(self._stream)
        return _Arrival(samples, is_there)

    def _read_locked(self, ids: Tensor, crops: Crops | None) -> Tensor:
        if crops is not None:
            assert isinstance(self._dataset, ReadsCrops)
            shape, last = (len(ids), *crops.sample_shape), torch.channels_last  # as decoders write them
            samples = torch.empty(shape, dtype=torch.uint8, memory_format=last, pin_memory=True)
            self._dataset.read_crops_into(ids, crops, samples)
            return samples
        if not isinstance(self._dataset, ReadsInto):
            return self._dataset.read(ids).pin_memory()
        samples = torch.empty((len(ids), *self._dataset.sample_shape), dtype=torch.uint8, pin_memory=True)
        self._dataset.read_into(ids, samples)
        return samples
