"""Create run folders without training."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.checkpoints.format import FileSeal, add_checksum
from paceline.checkpoints.store import commit, point, temporary_folder
from paceline.runs.folder import RunFolder, write_json
from paceline.runs.owner import Owner, this_process

HEADING = "epoch,phase,loss,accuracy,throughput\n"


def make_run(
    path: Path,
    state: str = "finished",
    *,
    recipe: str = "shapes-cnn",
    accuracies: tuple[float, ...] = (),
    age_s: float = 0.0,
    **status: Any,
) -> RunFolder:
    """Write `status.json`, `metrics.csv` and the other files of a run. The lock file is empty, as after a clean end."""
    folder = RunFolder(path)
    folder.create()
    folder.config.write_text("dataset: 'shapes'\n")
    write_json(folder.environment, {"recipe": recipe})
    folder.lock.touch()
    folder.write_status(state, **status)
    updated = datetime.fromtimestamp(time.time() - age_s).astimezone().isoformat(timespec="seconds")
    write_json(folder.status, {**folder.read_status(), "updated": updated})
    rows = [f"{n},train,1.5,0.5,{1000 + n}\n{n},val,1.5,{value},9999\n" for n, value in enumerate(accuracies, 1)]
    folder.metrics_csv.write_text(HEADING + "".join(rows))
    return folder


def hold(folder: RunFolder, owner: Owner) -> None:
    folder.lock.write_text(json.dumps(asdict(owner)))


def dead_owner() -> Owner:
    """An earlier process with the number of this process."""
    return replace(this_process(), process_start="1")


def elsewhere() -> Owner:
    return replace(this_process(), host="another-machine")


def add_checkpoints(folder: RunFolder, *steps: int, best: int | None = None, size_bytes: int = 1000) -> None:
    """Complete checkpoints, each with one tensor of this size in bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    payload = len(header).to_bytes(8, "little") + header + b"x" * size_bytes
    for step in steps:
        temporary = temporary_folder(folder.checkpoints, step)
        temporary.mkdir()
        (temporary / "model.safetensors").write_bytes(payload)
        seals = {"model.safetensors": FileSeal(len(payload), add_checksum(payload))}
        commit(temporary, seals, json.dumps({"step": step}).encode(), {"step": step})
    if steps:
        point(folder.checkpoints, "latest", folder.checkpoints / f"step-{max(steps):08}")
    if best is not None:
        point(folder.checkpoints, "best", folder.checkpoints / f"step-{best:08}")
