"""The metrics of a run. `metrics.jsonl` is the source; all other files are derived from it.

A row is one JSON object with its step. On resume, rows after the resumed step are removed before anything is appended,
so no file contains a step or an epoch twice. On a full disk, rows wait in memory until there is space. The run warns
once and training continues.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.metrics.sinks import Sink, open_sinks
from paceline.metrics.step_trace import StepTrace
from paceline.runs.folder import RunFolder, write_atomically
from paceline.runs.json_files import ROW, read_objects
from paceline.settings.small_files import open_plain

CSV_COLUMNS = ("epoch", "phase", "loss", "accuracy", "throughput")
Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All complete rows. A line that a crash has cut off is left out."""
    return read_objects(path, ROW)


def seconds_of_steps(rows: list[Row], global_batch_size: int) -> float:
    """The time of all steps over all attempts, each step counted once, without evaluation."""
    total_s, before = 0.0, 0  # of complete epochs, which end at step `before`
    for row in rows:
        if row.get("phase") == "train":
            total_s, before = total_s + row["seconds"], row["step"]
    for row in rows:  # a run that ended inside an epoch has steps after its last complete epoch
        if row["kind"] == "step" and row["step"] > before:
            total_s += (row["step"] - before) * global_batch_size / row["throughput"]
            before = row["step"]
    return total_s


def inherit_rows(source: RunFolder, folder: RunFolder) -> None:
    """A run that continues in a new folder copies its earlier rows."""
    if source.path.resolve() != folder.path.resolve() and not folder.metrics_jsonl.exists():
        rows = read_rows(source.metrics_jsonl)
        write_atomically(folder.metrics_jsonl, "".join(json.dumps(row) + "\n" for row in rows))
        if source.steps.is_file() and not folder.steps.exists():
            shutil.copyfile(source.steps, folder.steps, follow_symlinks=False)


class Recorder:
    """Appends rows and updates the derived files. Only the primary rank has one."""

    def __init__(self, folder: RunFolder, *, resume_step: int, is_validation_due: bool = False) -> None:
        """`is_validation_due`: this run will validate and record the epoch that ends at the resumed step."""
        folder.require_owner()
        self._folder = folder
        self._sinks: list[Sink] = []
        self._rows = [row for row in read_rows(folder.metrics_jsonl) if row["step"] <= resume_step]
        if is_validation_due:
            self._rows = [row for row in self._rows if row["kind"] != "epoch" or row["step"] < resume_step]
        # Test rows of an earlier end of the run are removed: this run tests again.
        self._rows = [row for row in self._rows if row.get("phase") != "test"]
        write_atomically(folder.metrics_jsonl, "".join(json.dumps(row) + "\n" for row in self._rows))
        self._file = open(folder.metrics_jsonl, "ab", buffering=0, opener=open_plain)  # noqa: SIM115
        self._waiting = b""  # lines that could not be written yet
        self._trace = StepTrace(folder.steps, resume_step)
        self._write_csv()

    def open_trackers(self, names: tuple[str, ...], config: dict[str, Any]) -> None:
        """Send all rows to these trackers: the existing ones now, later ones as they are recorded."""
        self._sinks = open_sinks(names, self._folder, config, history=self._rows)

    def step(self, step: int, **values: float) -> None:
        self._append({"kind": "step", "step": step, **values})

    def trace(self, loss: float, grad_norm: float) -> None:
        """The numbers of the next step; NaN if it was left out. They are written with the next row."""
        self._trace.add((loss, grad_norm))

    def epoch(self, step: int, *, epoch: int, phase: str, **values: float | dict[str, list[float]]) -> None:
        """phase: train, val or test. `ranks`: columns with one number per rank, which trackers do not get."""
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
        self._try(self._folder.steps.name, self._trace.write)
        for sink in self._sinks:
            self._try(type(sink).__name__, partial(sink.write, row))

    def _write_waiting(self) -> None:
        """Write all lines or none: a partial line would corrupt the next one."""
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
                lines.append(",".join(str(row.get(column, "")) for column in CSV_COLUMNS))
        text = "\n".join(lines) + "\n"
        self._try(self._folder.metrics_csv.name, lambda: self._replace_csv(text))

    def _replace_csv(self, text: str) -> None:
        self._folder.require_owner()
        write_atomically(self._folder.metrics_csv, text, is_durable=False)  # derived from metrics.jsonl

    def _try(self, what: str, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            self._folder.warn_on_write_error(what, error)
        else:
            self._folder.warn_on_write_error(what, None)
