"""TensorBoard event files in the run folder, always made from the whole of the metrics."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from paceline.metrics.sinks.base import scalars_of


class TensorBoardSink:
    """Epoch rows stand at their epoch, step rows at their step.

    Event files can only be appended to, so a resumed run writes them anew from the rows it kept: no
    point is shown twice, and none that the resume has cut off.
    """

    def __init__(self, folder: Path, history: list[dict[str, Any]]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(folder, ignore_errors=True)
        # Two clocks, two sets of files: TensorBoard draws both on an axis called "step".
        self._writers = {"epoch": SummaryWriter(str(folder)), "step": SummaryWriter(str(folder / "steps"))}
        for row in history:
            self._add(row)

    def write(self, row: dict[str, Any]) -> None:
        self._add(row)
        self._writers[row["kind"]].flush()

    def _add(self, row: dict[str, Any]) -> None:
        kind = row["kind"]
        for name, value in scalars_of(row).items():
            self._writers[kind].add_scalar(name, value, row[kind], walltime=row["time"])

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
