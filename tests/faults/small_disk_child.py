"""Complete runs on real small disks: tmpfs mounts in a separate mount namespace.

    unshare -rm python small_disk_child.py FOLDER

Prints one JSON object. For each scenario: how its run ended, its output, and the files on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from faults.disks import fill, is_full, make_read_only, mount_disk
from harness.ranks import make_world
from harness.runs import train_in
from paceline.checkpoints import store
from paceline.checkpoints.format import step_folders, step_of, verify
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention
from paceline.errors import PacelineError
from paceline.metrics.recorder import Recorder, read_rows
from paceline.runs.patience import PATIENCE

FLAGS = ("--save-steps=3", "--keep-last=1", "--no-async-save")
MB = 2**20


def at_steps(actions: dict[int, Callable[[], object]]) -> Callable[..., None]:
    """A Recorder.step that changes the disk right before these steps are recorded."""
    record = Recorder.step

    def step(self: Recorder, number: int, **values: float) -> None:
        actions.get(number, lambda: None)()
        record(self, number, **values)

    return step


def run_scenario(folder: Path, actions: dict[int, Callable[[], object]]) -> dict[str, Any]:
    """Train in a folder while its disk has a fault. Returns how the run ended and its output."""
    out, record = io.StringIO(), Recorder.step
    handler = logging.StreamHandler(out)
    logger = logging.getLogger("paceline")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    result: dict[str, Any] = {"code": 0, "screen": "", "weights": None}
    Recorder.step = at_steps(actions)  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            result["weights"] = train_in(make_world(0, 1), str(folder), FLAGS)["weights_sha256"]
    except PacelineError as error:
        result |= {"code": error.exit_code, "screen": error.screen()}
    except Exception:
        result |= {"code": 70, "screen": traceback.format_exc()}
    finally:
        Recorder.step = record  # type: ignore[method-assign]
        logger.removeHandler(handler)
    return {**result, "out": out.getvalue(), **look_at(folder)}


def look_at(folder: Path) -> dict[str, Any]:
    checkpoints = folder / "checkpoints"
    steps = step_folders(checkpoints)
    for path in steps:
        verify(path)
    hidden = [str(path.relative_to(folder)) for path in folder.rglob(".*")]
    return {
        "exists": folder.exists(),
        "steps": [step_of(path) for path in steps],
        "leftovers": hidden,
        "rows": [row["step"] for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step" and row["step"]],
    }


def enough_room(base: Path) -> dict[str, Any]:
    mount_disk(base, 64)
    return run_scenario(base / "run", {})


def full_for_a_while(base: Path) -> dict[str, Any]:
    mount_disk(base, 24)
    was_full = []

    def fill_it() -> None:
        fill(base)
        was_full.append(is_full(base))

    # A disk allocates whole pages. These rows need a second page for the metrics while none is free.
    (base / "run").mkdir()
    (base / "run" / "metrics.jsonl").write_text(60 * (json.dumps({"kind": "step", "step": 0, "loss": 0.0}) + "\n"))
    result = run_scenario(base / "run", {5: fill_it, 10: (base / "filler").unlink})
    return {**result, "was_full": was_full == [True]}


def full_for_good(base: Path) -> dict[str, Any]:
    mount_disk(base, 24)
    result = run_scenario(base / "run", {5: lambda: fill(base)})
    return {**result, "was_full": is_full(base)}


def eight_megabytes(base: Path) -> dict[str, Any]:
    """Room for one checkpoint of this run but not for two."""
    mount_disk(base, 8)
    return run_scenario(base / "run", {})


def full_while_writing(base: Path) -> dict[str, Any]:
    """Another process uses the free space after the save began. The check of the free space is a fake."""
    mount_disk(base, 8)
    manager = CheckpointManager(
        base / "checkpoints", make_world(0, 1), is_sharded=False, retention=Retention(), is_async=False
    )
    state: dict[str, Any] = {"keep": False, "validation": None}
    save = {"model": {"w": torch.zeros(5 * MB // 4)}}
    manager.save(save, {"step": 1, **state}, {"step": 1}, is_best=False)
    used_before = shutil.disk_usage(base).used
    look, store.free_bytes = store.free_bytes, lambda folder: 10**12
    try:
        manager.save(save, {"step": 2, **state}, {"step": 2}, is_best=False)
    finally:
        store.free_bytes = look
    return {
        **look_at(base),
        "failures": manager._failures_in_a_row,
        "bytes_left_behind": shutil.disk_usage(base).used - used_before,
    }


def read_only(base: Path) -> dict[str, Any]:
    mount_disk(base, 24)
    folder = base / "run"
    result = run_scenario(folder, {5: lambda: make_read_only(folder)})
    try:
        (folder / "probe").touch()
    except OSError as error:
        result["is_read_only"] = error.errno == errno.EROFS
    return result


def read_only_when_saving(base: Path) -> dict[str, Any]:
    """Only the folder of the checkpoints. The save detects it, the status does not."""
    mount_disk(base, 24)
    return run_scenario(base / "run", {5: lambda: make_read_only(base / "run" / "checkpoints")})


def deleted(base: Path) -> dict[str, Any]:
    mount_disk(base, 24)
    folder = base / "run"
    return run_scenario(folder, {5: lambda: shutil.rmtree(folder)})


SCENARIOS = (
    *(enough_room, full_for_a_while, full_for_good, eight_megabytes, full_while_writing),
    *(read_only, read_only_when_saving, deleted),
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ[PATIENCE] = "0"  # the third consecutive failure ends a run
    scenarios = {scenario.__name__: scenario(Path(sys.argv[1]) / scenario.__name__) for scenario in SCENARIOS}
    sys.stdout.write(json.dumps(scenarios))
    sys.stdout.flush()
    os._exit(0)  # no cleanup: the mounts end with the namespace
