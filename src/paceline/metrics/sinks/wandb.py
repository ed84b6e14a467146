"""Weights & Biases runs: offline files in the run folder, or the mode in WANDB_MODE."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.metrics.sinks.base import CarefulSink, scalars_of
from paceline.runs.folder import write_json
from paceline.settings.small_files import read_json_object

PROJECT = "paceline"


class WandbSink(CarefulSink):
    """One W&B run per run folder; a resumed run continues under the same id.

    Offline, every process writes its own `offline-run-*` folder, and `wandb sync` joins folders with the same id. W&B
    cannot delete points. Rows that the interrupted run wrote after its last checkpoint stay, and the resumed run does
    not write these steps again. Every step has one point. For repeated steps, W&B has the first values and
    `metrics.jsonl` the second. The last step of each kind of row is stored next to the id, because offline there is no
    server to query. A killed process may leave a gap of its last second or its last step, but never a duplicate.
    """

    name = "W&B"

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._file = folder / ".wandb-run"
        self._written: dict[str, int] = {}  # the last step of each kind of row, kept for the next process
        super().__init__(folder, config)

    def _open(self, folder: Path, config: dict[str, Any]) -> None:
        mode = None  # use WANDB_MODE
        if not os.environ.get("WANDB_MODE"):
            mode = "offline"
            # Offline mode sends no crash reports either. wandb reads this when it is imported.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

        # Seconds until a row is on disk, 15 by default. Rows that a killed process has not flushed are lost to W&B.
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
            # Do not capture the console: the run has its own log files.
            settings=wandb.Settings(console="off", silent=True),
        )
        if self._run.id != run_id:
            self._written = {}
        self._keep()

    def _read_earlier(self) -> str | None:
        """Read the id of this folder's W&B run, if there is one, and fill `_written`."""
        try:
            earlier = read_json_object(self._file)
            self._written = {str(kind): int(step) for kind, step in earlier["written"].items()}
            return str(earlier["id"])
        except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):  # missing or invalid
            return None

    def _log(self, row: dict[str, Any]) -> None:
        kind = str(row.get("phase", "step"))
        if row["step"] <= self._written.get(kind, -1):
            return
        # W&B joins everything logged at one step: a step row and the following epoch rows become one entry.
        self._run.log(scalars_of(row), step=row["step"])
        self._written[kind] = row["step"]
        self._keep()

    def _keep(self) -> None:
        write_json(self._file, {"id": self._run.id, "written": self._written}, is_durable=False)

    def _end(self) -> None:
        self._run.finish()
