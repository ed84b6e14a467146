"""TensorBoard event files in the run folder, always written from all metrics rows."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from paceline.metrics.sinks.base import CarefulSink, scalars_of
from paceline.settings.small_files import make_plain_folder


class TensorBoardSink(CarefulSink):
    """Epoch rows use the epoch as x value, step rows the step.

    Event files can only be appended to. A resumed run rewrites them from the rows it keeps, so that no point appears
    twice and removed rows disappear.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, history: list[dict[str, Any]]) -> None:
        self._history = history
        super().__init__(folder, {})

    def _open(self, folder: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _silence_writer_threads()
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_plain_folder(folder)  # rmtree does not remove a link, and we must not write through it
        # Two sets of files, because TensorBoard draws epochs and steps on the same axis "step".
        self._writers = {"epoch": SummaryWriter(str(folder)), "step": SummaryWriter(str(folder / "steps"))}
        for row in self._history:
            self._add(row)

    def _log(self, row: dict[str, Any]) -> None:
        self._add(row)
        self._writers[row["kind"]].flush()

    def _add(self, row: dict[str, Any]) -> None:
        kind = row["kind"]
        for name, value in scalars_of(row).items():
            self._writers[kind].add_scalar(name, value, row[kind], walltime=row["time"])

    def _end(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _silence_writer_threads() -> None:
    """Hide the traceback of a TensorBoard thread that cannot write. The next write raises the same error."""
    before = threading.excepthook
    if getattr(before, "is_of_paceline", False):
        return

    def report(arguments: threading.ExceptHookArgs) -> None:
        if type(arguments.thread).__module__.partition(".")[0] != "tensorboard":
            before(arguments)

    report.is_of_paceline = True  # type: ignore[attr-defined]
    threading.excepthook = report
