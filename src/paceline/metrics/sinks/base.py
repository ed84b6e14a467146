"""The interface between the recorder and trackers."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """Receives every metrics row as it is recorded."""

    def write(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class CarefulSink(ABC):
    """Wraps a third-party tracker. A failure never ends the run: it is reported once, and later rows are skipped."""

    name: str  # the name to display

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._is_quiet = False
        self._try(partial(self._open, folder, config))

    def write(self, row: dict[str, Any]) -> None:
        self._try(partial(self._log, row))

    def close(self) -> None:
        self._try(self._end)

    def _try(self, work: Callable[[], None]) -> None:
        if self._is_quiet:
            return
        try:
            work()
        except Exception as error:
            self._is_quiet = True
            reason = str(error).strip().partition("\n")[0]
            logging.getLogger("paceline").warning(
                "%s gets no more rows (%s: %s); metrics.jsonl has them all", self.name, type(error).__name__, reason
            )

    @abstractmethod
    def _open(self, folder: Path, config: dict[str, Any]) -> None: ...

    @abstractmethod
    def _log(self, row: dict[str, Any]) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...


def scalars_of(row: dict[str, Any]) -> dict[str, float]:
    """A row's numbers under the names trackers show: `train/loss`, `step/lr`."""
    prefix = row["phase"] if row["kind"] == "epoch" else "step"
    skipped = ("kind", "step", "epoch", "phase", "time", "ranks")
    return {f"{prefix}/{name}": value for name, value in row.items() if name not in skipped and value is not None}
