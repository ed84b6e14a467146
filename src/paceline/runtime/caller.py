"""Messages between a run and the Python process that called `paceline.train`, as files in a folder of the caller.

The primary rank appends a line per epoch. If the caller wants the run to end now, but with its test and results, it
makes a file there and sends a stop signal. A stop signal without this file ends the run without test and results.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

CALLER_DIR = "PACELINE_CALLER_DIR"  # set by the caller, for all processes of the run
_EPOCHS = "epochs.jsonl"
_END = "end-with-results"


def report_epoch(row: dict[str, Any]) -> None:
    """For the primary rank. A caller whose disk is full misses epochs; the run continues."""
    folder = os.environ.get(CALLER_DIR)
    if folder:
        with suppress(OSError), (Path(folder) / _EPOCHS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def is_end_with_results_wanted() -> bool:
    folder = os.environ.get(CALLER_DIR)
    return bool(folder) and (Path(str(folder)) / _END).exists()


def ask_for_results(folder: Path) -> None:
    """For the caller, before it sends a stop signal."""
    (folder / _END).touch()


class EpochReports:
    """The lines of the run, for the caller."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _EPOCHS
        self._read_bytes = 0

    def read_new(self) -> list[dict[str, Any]]:
        """The complete lines since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
