"""The primary rank of a run around its saves: `open_session` and `save` with a stand-in for data and model.

There is no training: the row of step N in metrics.jsonl has loss N, and every weight of its checkpoint is N.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from harness.ranks import make_world
from paceline.checkpoints import store
from paceline.checkpoints.format import step_folders, step_of, verify
from paceline.metrics.recorder import read_rows
from paceline.metrics.step_trace import read_trace
from paceline.runs.epoch_clock import EpochClock
from paceline.runs.folder import RunFolder, has_checkpoint
from paceline.runs.members import MEMBERS, Member
from paceline.runs.place import RunPlace
from paceline.settings.schema import Config
from paceline.training import session as session_module
from paceline.training.epoch import save
from paceline.training.guards import Guards
from paceline.training.state import TrainState

SHARPEST = store.Retention(keep_last=1, keep_best=1)  # no spare checkpoints: any loss is detected


@contextmanager
def as_another_process() -> Iterator[None]:
    """The block runs with the process number of an ended process."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with mock.patch.object(os, "getpid", return_value=ended.pid):
        yield


def stand_in_components(line: int) -> Any:
    """Replaces data, model and optimizer. `line` is the branch of a run: a rewind starts a new one."""

    def payload(world: Any) -> dict[str, dict[str, torch.Tensor]]:
        return {kind: {"w": torch.full((2,), float(components.state.step))} for kind in ("model", "optimizer")}

    def resume(checkpoint: store.Checkpoint, world: Any) -> TrainState:
        components.line = max(components.line, checkpoint.state["line"])
        return TrainState.from_json(checkpoint.state)

    components: Any = SimpleNamespace(
        line=line,
        state=TrainState(),
        step=SimpleNamespace(),
        data=SimpleNamespace(to_json=dict),
        model=SimpleNamespace(strategy="single", module=torch.nn.Identity()),
        plan=SimpleNamespace(clock=EpochClock(1), last_step=10**6),
        checkpoint_bytes=lambda: 0,
        payload=payload,
        resume=resume,
        state_json=lambda state, *, keep: {**state.to_json(), "line": components.line, "keep": keep, "config": {}},
        about=lambda state: {"step": state.step},
    )
    return components


class RunLife:
    """One attempt: opens the folder as its owner, resumes, trains and saves."""

    def __init__(
        self,
        path: Path,
        *,
        retention: store.Retention = SHARPEST,
        goes_back_to: int | None = None,
        line: int = 0,
        member: Member | None = None,
    ) -> None:
        """Without `member` this process owns the folder; with it, this process is a rank of that owner."""
        self.folder = RunFolder(path, member)
        self.folder.create()
        self._held = ExitStack()
        guards = Guards(member=member or self._held.enter_context(self.folder.owned()))
        self.folder.write_status("running", step=0)
        config = Config()
        last, best = retention.keep_last, retention.keep_best
        saves = replace(config.run, keep_last=last, keep_best=best, async_save=False, track=())
        config = replace(config, run=saves)
        source = path if has_checkpoint(path) else None
        if goes_back_to is not None:
            source = self.folder.checkpoints / f"step-{goes_back_to:08}"
        components = stand_in_components(line)
        with (
            mock.patch.object(session_module, "build_components", return_value=components),
            mock.patch.object(session_module, "describe_run", return_value=[]),
            mock.patch.object(session_module.Console, "note"),
        ):
            place = RunPlace(path, source)
            self.session = session_module.open_session(config, make_world(0, 1), place, guards, eval_batches=None)
        components.state = self.session.state
        self.line = components.line

    @property
    def step(self) -> int:
        return self.session.state.step

    @property
    def best_step(self) -> int:
        return self.session.state.best_step

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.session.state.step += 1
            assert self.session.recorder is not None
            self.session.recorder.trace(float(self.step), 1.0)
            self.session.recorder.step(self.step, loss=float(self.step))

    def save(self, *, is_best: bool = False) -> dict[str, Any]:
        """Save, and return the checkpoints that must survive from now on. Raises if the manager reports a failure."""
        state = self.session.state
        if is_best:
            state.best_epoch, state.best_step = self.step, self.step
            state.best_accuracy, state.best_loss = self.step / 1000, 1.0
        state.validation = {"accuracy": self.step / 1000, "loss": 1.0} if is_best else None
        save(self.session, is_best=is_best)
        self.session.checkpoints.finish()
        if self.session.checkpoints._failures_in_a_row:
            raise OSError("the save failed")
        self.folder.write_status("running", step=self.step)
        kept = sorted(steps_in(self.folder))
        return {"step": self.step, "kept": kept, "best": self.best_step, "line": self.line}

    def close(self) -> None:
        if self.session.recorder is not None:
            self.session.recorder.close()
        self._held.close()


def steps_in(folder: RunFolder) -> list[int]:
    return [step_of(path) for path in step_folders(folder.checkpoints)]


def check_whole(folder: RunFolder) -> set[int]:
    """Check that every named checkpoint is complete and has its own step. Returns the steps."""
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
    """Check that there is exactly one row for every step up to this one."""
    assert [(row["step"], row["loss"]) for row in read_rows(folder.metrics_jsonl)] == [
        (number, float(number)) for number in range(1, step + 1)
    ]
    assert read_trace(folder.steps) == [(float(number), 1.0) for number in range(1, step + 1)]


def leftovers_in(folder: RunFolder) -> list[str]:
    """Files and folders that are not needed any more. The record of the living owner is needed."""
    found = [path for path in folder.path.rglob("*") if path.name.startswith((".", "damaged-"))]
    return sorted(str(path.relative_to(folder.path)) for path in found if path.name != MEMBERS)
