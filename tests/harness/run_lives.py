"""The life of a run's primary around its saves, by the real parts and in the order of `worker` and `open_ride`.

There is no training: the row of step N in metrics.jsonl has loss N, and every weight of its checkpoint is N.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from harness.ranks import make_world
from paceline.checkpoints import store
from paceline.checkpoints.best import adopt_best
from paceline.checkpoints.format import step_folders, step_of, verify
from paceline.checkpoints.manager import CheckpointManager
from paceline.metrics.recorder import Recorder, read_rows
from paceline.runs.folder import RunFolder, has_checkpoint
from paceline.runs.members import MEMBERS

SHARPEST = store.Retention(keep_last=1, keep_best=1)  # nothing to spare: whatever is lost is missed


@contextmanager
def as_another_process() -> Iterator[None]:
    """What is done here is done under the number of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with mock.patch.object(os, "getpid", return_value=ended.pid):
        yield


class RunLife:
    """One attempt: opens the folder as its owner, resumes, trains and saves."""

    def __init__(self, path: Path, *, retention: store.Retention = SHARPEST) -> None:
        self.folder = RunFolder(path)
        self.folder.create()
        self._held = ExitStack()
        self._held.enter_context(self.folder.owned())
        world = make_world(0, 1)
        self.folder.write_status("running", step=0)
        self.manager = CheckpointManager(
            self.folder.checkpoints,
            world,
            is_sharded=False,
            retention=retention,
            is_async=False,
            flushed_first=(self.folder.metrics_jsonl, self.folder.status, path),
            require_owner=self.folder.require_owner,
        )
        resumed = self.manager.choose(path) if has_checkpoint(path) else None
        if resumed is None:
            self.manager.begin_at_zero(None, may_drop_damaged=False)
        self.step = resumed.step if resumed else 0
        self.best_step = int(resumed.state["best_step"]) if resumed else 0
        if resumed:
            adopt_best(resumed.path.parent, self.folder.checkpoints, self.best_step)
        self.manager.branch_at(self.step)
        self.recorder = Recorder(self.folder, resume_step=self.step)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            self.recorder.step(self.step, loss=float(self.step))

    def save(self, *, is_best: bool = False, keep: bool = False) -> dict[str, Any]:
        """Save, and return what may be relied on from now on. Raises if the manager reports a failure."""
        self.best_step = self.step if is_best else self.best_step
        validation = {"accuracy": float(self.step), "loss": 1.0} if is_best else None
        state = {"step": self.step, "best_step": self.best_step, "keep": keep, "validation": validation}
        payload = {kind: {"w": torch.full((2,), float(self.step))} for kind in ("model", "optimizer")}
        self.manager.save(payload, state, {"step": self.step}, is_best=is_best)
        self.manager.wait()
        if self.manager._failures_in_a_row:
            raise OSError("the save failed")
        self.folder.write_status("running", step=self.step)
        return {"step": self.step, "kept": sorted(steps_in(self.folder)), "best": self.best_step}

    def close(self) -> None:
        self.recorder.close()
        self._held.close()


def steps_in(folder: RunFolder) -> list[int]:
    return [step_of(path) for path in step_folders(folder.checkpoints)]


def check_whole(folder: RunFolder) -> set[int]:
    """Every checkpoint that has a name is whole and holds its own step; returns their steps."""
    steps = set()
    for path in step_folders(folder.checkpoints):
        verify(path)
        state = store.open_checkpoint(path).state
        assert state["step"] == step_of(path)
        for kind in ("model", "optimizer"):
            assert load_file(path / f"{kind}.safetensors")["w"].tolist() == [state["step"]] * 2
        steps.add(step_of(path))
    for name in ("latest", "best"):
        target = store.pointed_at(folder.checkpoints, name)
        assert target is None or step_of(target) in steps
    return steps


def check_rows(folder: RunFolder, step: int) -> None:
    """There is one row for every step up to this one, and no other."""
    assert [(row["step"], row["loss"]) for row in read_rows(folder.metrics_jsonl)] == [
        (number, float(number)) for number in range(1, step + 1)
    ]


def leftovers_in(folder: RunFolder) -> list[str]:
    """Files and folders that no one needs any more."""
    found = [path for path in folder.path.rglob("*") if path.name.startswith((".", "damaged-"))]
    # The record of the owner, which is alive while this is asked.
    return sorted(str(path.relative_to(folder.path)) for path in found if path.name != MEMBERS)
