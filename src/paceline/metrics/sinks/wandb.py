"""Weights & Biases runs: offline files in the run folder, or what WANDB_MODE says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.metrics.sinks.base import CarefulSink, scalars_of
from paceline.runs.folder import write_json
from paceline.settings.small_files import read_json_object

PROJECT = "paceline"


class WandbSink(CarefulSink):
    """One W&B run per run folder; a resumed run goes on under the same id.

    Offline, every process leaves its own `offline-run-*` folder, and `wandb sync` joins those with one id.
    W&B can delete no point, so rows that the interrupted run wrote past its last checkpoint stay, and
    those of the resumed run up to the same step are left out: every step stands once, the cut-off tail
    with the values of its first time. `metrics.jsonl` has those of the second. How far each kind of
    row had come is kept beside the id, because offline there is nobody to ask. A killed process may thus
    leave a gap of its last second and its last step, never a step twice.
    """

    name = "W&B"

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._file = folder / ".wandb-run"
        self._written: dict[str, int] = {}  # the last step of each kind of row, kept for the next process
        super().__init__(folder, config)

    def _open(self, folder: Path, config: dict[str, Any]) -> None:
        mode = None  # as WANDB_MODE says
        if not os.environ.get("WANDB_MODE"):
            mode = "offline"
            # Offline is offline: W&B's own crash reports stay at home too. Read when wandb is imported.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

        # Seconds until a row is on disk, 15 by default; what a killed process had not flushed is lost to W&B.
        os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")

        import wandb

        run_id = self._read_earlier()
        self._run = wandb.init(
            project=PROJECT,
            name=folder.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            mode=mode,
            config=config,
            # The run has its own console and its own log files.
            settings=wandb.Settings(console="off", silent=True),
        )
        if self._run.id != run_id:
            self._written = {}
        self._keep()

    def _read_earlier(self) -> str | None:
        """The id of this folder's run, if it had one; `_written` is filled along with it."""
        try:
            earlier = read_json_object(self._file)
            self._written = {str(kind): int(step) for kind, step in earlier["written"].items()}
            return str(earlier["id"])
        except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):  # none, or not a whole one
            return None

    def _log(self, row: dict[str, Any]) -> None:
        kind = str(row.get("phase", "step"))
        if row["step"] <= self._written.get(kind, -1):
            return
        # W&B joins what is logged at one step, so a step row and the epoch rows after it make one entry.
        self._run.log(scalars_of(row), step=row["step"])
        self._written[kind] = row["step"]
        self._keep()

    def _keep(self) -> None:
        write_json(self._file, {"id": self._run.id, "written": self._written}, is_durable=False)

    def _end(self) -> None:
        self._run.finish()
