"""The run folder: plain files with one owner, readable by any tool.

    config.yaml  environment.json  status.json  run.lock  metrics.jsonl  metrics.csv  results.json
    tensorboard/  logs/rank-*.log  checkpoints/{step-*,latest,best}

Small files are replaced whole, by rename, so that a reader never sees half of one.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.errors import UserError

RUNS = Path("runs")
CHECKPOINT_MARK = "manifest.json"  # what makes a step folder a checkpoint


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file in one move."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2) + "\n")


class RunFolder:
    """Paths and small files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.status = path / "status.json"
        self.lock = path / "run.lock"
        self.metrics_jsonl = path / "metrics.jsonl"
        self.metrics_csv = path / "metrics.csv"
        self.results = path / "results.json"
        self.tensorboard = path / "tensorboard"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"

    def create(self) -> None:
        try:
            for folder in (self.path, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                "the run folder cannot be created",
                where=str(self.path),
                got=error.strerror,
                hint="--output-dir PATH",
            ) from error

    @property
    def holds_a_run(self) -> bool:
        return self.config.exists() or self.metrics_jsonl.exists()

    def log_of(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def write_status(self, state: str, **details: Any) -> None:
        """state: running, preempted, finished or failed."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        content = {
            "status": state,
            **details,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "updated": now,
        }
        write_json(self.status, content)

    def read_status(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(self.status.read_text())
        except (OSError, ValueError):
            return {}
        return content

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold the folder; a second owner is refused. The lock dies with its process."""
        with self.lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                raise UserError(
                    "another process is writing to this run folder",
                    where=str(self.path),
                    got=file.read().strip() or "an unknown owner",
                    hint="wait for it, stop it, or give another --output-dir",
                ) from error
            file.truncate(0)
            file.write(f"{socket.gethostname()} pid {os.getpid()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
            file.flush()
            yield


def has_checkpoint(path: Path) -> bool:
    """Whether this is a checkpoint, or a run folder or checkpoints folder that holds one."""
    patterns = (CHECKPOINT_MARK, f"step-*/{CHECKPOINT_MARK}", f"checkpoints/step-*/{CHECKPOINT_MARK}")
    return any(True for pattern in patterns for _ in path.glob(pattern))


def require_run_folder(path: Path) -> None:
    if not (path / "config.yaml").is_file():
        raise UserError("this is not a run folder", where=str(path), hint="a folder that paceline train wrote")


def new_run_folder(recipe_name: str) -> Path:
    """A fresh `runs/<recipe>-<time>`."""
    stem = f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = RUNS / stem
    number = 2
    while path.exists():
        path = RUNS / f"{stem}-{number}"
        number += 1
    return path


def newest_run_folder(recipe_name: str) -> Path | None:
    """The newest run of this recipe that has a checkpoint to go on from."""
    runs = [path for path in RUNS.glob(f"{recipe_name}-[0-9]*") if has_checkpoint(path)]
    return max(runs, key=lambda path: path.name, default=None)
