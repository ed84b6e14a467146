"""The metrics of a run. `metrics.jsonl` is the truth; everything else is made from it.

A row is one JSON object with its step. On resume, rows after the resumed step are cut off before
anything is appended, so no file ever holds a step or an epoch twice. On a full disk rows wait in memory
until there is room: a warning, once, and training goes on.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.metrics.sinks.base import Sink
from paceline.metrics.sinks.open import open_sinks
from paceline.runs.file_shapes import ROW
from paceline.runs.folder import RunFolder, write_atomically
from paceline.runs.json_files import read_objects
from paceline.settings.small_files import open_plain

CSV_COLUMNS = ("epoch", "phase", "loss", "accuracy", "throughput")
Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All complete rows; a line torn by a crash is left out."""
    return read_objects(path, ROW)


def inherit_rows(source: RunFolder, folder: RunFolder) -> None:
    """A run that goes on in a new folder takes its history along."""
    if source.path.resolve() != folder.path.resolve() and not folder.metrics_jsonl.exists():
        rows = read_rows(source.metrics_jsonl)
        write_atomically(folder.metrics_jsonl, "".join(json.dumps(row) + "\n" for row in rows))


class Recorder:
    """Appends rows and keeps the derived files in step. Only the primary has one."""

    def __init__(self, folder: RunFolder, *, resume_step: int, is_validation_due: bool = False) -> None:
        """`is_validation_due`: the epoch that ends at this step will be validated, and recorded, by this run."""
        folder.require_owner()
        self._folder = folder
        self._sinks: list[Sink] = []
        self._rows = [row for row in read_rows(folder.metrics_jsonl) if row["step"] <= resume_step]
        if is_validation_due:
            self._rows = [row for row in self._rows if row["kind"] != "epoch" or row["step"] < resume_step]
        # The test rows of an earlier finish belong to that finish.
        self._rows = [row for row in self._rows if row.get("phase") != "test"]
        write_atomically(folder.metrics_jsonl, "".join(json.dumps(row) + "\n" for row in self._rows))
        self._file = open(folder.metrics_jsonl, "ab", buffering=0, opener=open_plain)  # noqa: SIM115
        self._waiting = b""  # lines that could not be written yet
        self._write_csv()

    def open_trackers(self, names: tuple[str, ...], config: dict[str, Any]) -> None:
        """From now on every row goes to these trackers too; they are given the rows so far."""
        self._sinks = open_sinks(names, self._folder, config, history=self._rows)

    def step(self, step: int, **values: float) -> None:
        self._append({"kind": "step", "step": step, **values})

    def epoch(self, step: int, *, epoch: int, phase: str, **values: float | dict[str, list[float]]) -> None:
        """phase: train, val or test. `ranks`: columns with a number of each rank; they are not for trackers."""
        self._append({"kind": "epoch", "step": step, "epoch": epoch, "phase": phase, **values})
        self._write_csv()

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            self._try(type(sink).__name__, sink.close)

    def _append(self, row: Row) -> None:
        row = {**row, "time": round(time.time(), 3)}
        self._rows.append(row)
        self._waiting += (json.dumps(row) + "\n").encode()
        self._try(self._folder.metrics_jsonl.name, self._write_waiting)
        for sink in self._sinks:
            self._try(type(sink).__name__, partial(sink.write, row))

    def _write_waiting(self) -> None:
        """All lines or none of them: half a line would spoil the next one too."""
        whole_bytes = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(self._waiting) != len(self._waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), whole_bytes)
            raise
        self._waiting = b""

    def _write_csv(self) -> None:
        lines = [",".join(CSV_COLUMNS)]
        for row in self._rows:
            if row["kind"] == "epoch":
                lines.append(",".join(str(row[column]) for column in CSV_COLUMNS))
        text = "\n".join(lines) + "\n"
        self._try(self._folder.metrics_csv.name, lambda: self._replace_csv(text))

    def _replace_csv(self, text: str) -> None:
        self._folder.require_owner()
        write_atomically(self._folder.metrics_csv, text, is_durable=False)  # it is made from metrics.jsonl

    def _try(self, what: str, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self._folder.warn_on_write_error(what, error)
        else:
            self._folder.warn_on_write_error(what, None)
