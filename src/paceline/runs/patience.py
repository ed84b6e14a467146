"""Retry reads from storage that is temporarily unavailable. After a time limit the run ends with exit code 4.

A storage error does not mean that the data is damaged. It is never a reason to rename or delete a checkpoint, to use
an older one, or to start a run at step 0. Only data that was read and is wrong is damaged.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from paceline.errors import CheckpointError, PacelineError, UnavailableData
from paceline.settings.values import STORAGE_PATIENCE, read_number

_log = logging.getLogger("paceline")
PATIENCE = STORAGE_PATIENCE
_PATIENCE_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0
_T = TypeVar("_T")


class UnreadableNow(CheckpointError):
    """The storage could not be read. The data may be intact."""

    def __init__(self, path: Path | str, error: OSError) -> None:
        super().__init__(
            "checkpoints cannot be read now",
            where=str(path),
            got=error.strerror or str(error),
            hint="nothing was renamed or deleted; make the path readable, then start again with --resume auto",
        )


def patience_s() -> float:
    """How long storage may fail before the run ends."""
    return read_number(PATIENCE, _PATIENCE_S)


def data_unreadable_now(place: Path | str, error: OSError) -> UnavailableData:
    return UnavailableData(
        "the data cannot be read now",
        where=str(place),
        got=error.strerror or str(error),
        hint="start again when it can be read; the run continues where it stopped",
    )


def read_patiently(
    what: str,
    path: Path | str,
    read: Callable[[], _T],
    unreadable: Callable[[Path | str, OSError], PacelineError] = UnreadableNow,
) -> _T:
    """Repeat a read until it works. Raises `unreadable` after the time limit. A missing file is not retried."""
    limit_s = patience_s()
    deadline, pause_s, is_reported = time.monotonic() + limit_s, _FIRST_PAUSE_S, False
    while True:
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError):
            raise
        except (OSError, UnreadableNow) as error:
            found = error if isinstance(error, UnreadableNow) else unreadable(path, error)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise found from (error if isinstance(error, OSError) else error.__cause__)
            if not is_reported:
                is_reported = True
                _log.warning("warning: %s: %s; trying again for up to %.0f s", what, found.got, limit_s)
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def is_present(path: Path) -> bool:
    """Whether the path exists. Raises OSError if the storage does not answer; `Path.exists` could return False."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def names_in(folder: Path) -> list[str]:
    """The names in a folder, none if there is no such folder. Raises OSError if the storage does not answer."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - only the names, and its errors
    except (FileNotFoundError, NotADirectoryError):
        return []
