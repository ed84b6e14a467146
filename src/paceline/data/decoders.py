"""Decodes pictures, one by one or in processes: chunk by chunk, in order, with a bounded queue. Imports no torch.

The processes are spawned, so they inherit nothing. They exit when their parent exits for any reason.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from paceline.data.encoded_pictures import EncodedPictures
from paceline.data.pictures import Seen, look_at_picture
from paceline.errors import DataError, UnavailableData
from paceline.runs.interpreter import safe_path

_WAITING_CHUNKS = 16  # per process: enough work while the caller is busy

Key = TypeVar("Key")
Result = TypeVar("Result")


def look_at(pictures: EncodedPictures, index: int) -> Seen | str:
    """Decode a picture. If it cannot be read: why."""
    try:
        return look_at_picture(pictures.read(index))
    except UnavailableData:
        raise
    except DataError as error:
        return str(error.got)


def in_processes(
    function: Callable[..., Result], tasks: Iterable[tuple[Key, tuple[Any, ...]]], workers: int
) -> Iterator[tuple[Key, Result]]:
    """Yield (key, `function(*arguments)`) for each (key, arguments), in the order of `tasks`."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_start)
    waiting: deque[tuple[Key, Future[Result]]] = deque()
    todo = iter(tasks)
    try:
        while True:
            with safe_path():  # submitting starts processes
                for key, arguments in islice(todo, _WAITING_CHUNKS * workers - len(waiting)):
                    waiting.append((key, pool.submit(function, *arguments)))
            if not waiting:
                return
            key, future = waiting.popleft()
            yield key, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that decodes pictures was killed", hint="try again; if memory is short, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def look_at_pictures(names: list[str]) -> list[Seen | str]:
    """Decode pictures. For one that cannot be read: why."""
    return [_look_at(Path(name)) for name in names]


def _look_at(path: Path) -> Seen | str:
    try:
        return look_at_picture(path)
    except DataError as error:
        return str(error.got)


def _start() -> None:
    # The terminal sends SIGINT to the whole process group; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
