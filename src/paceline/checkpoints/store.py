"""Checkpoints on disk: `checkpoints/step-00000700/{model,optimizer,ema}.safetensors, state.json`.

A checkpoint is written under a temporary name, flushed to disk and renamed, then `latest` (and `best`)
are pointed at it; the ones nobody points at any more go last. So a folder with a step's name is whole,
and there is always a good one. Tensors are safetensors, the rest is JSON: reading runs no code.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from paceline.checkpoints.capture import Tensors
from paceline.errors import CheckpointError
from paceline.runs.folder import CHECKPOINT_STATE as STATE
from paceline.runs.folder import locate_checkpoint

_PREFIX, _TEMPORARY = "step-", ".tmp-"


@dataclass(frozen=True)
class Checkpoint:
    """A committed step folder."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def run_path(self) -> Path:
        """The run folder this checkpoint belongs to."""
        return self.path.parent.parent

    def tensors(self, name: str) -> Tensors:
        """The tensors of `model`, `optimizer` or `ema`."""
        file = self.path / f"{name}.safetensors"
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                "a checkpoint file cannot be read", where=str(file), got=str(error)
            ) from error


def commit(
    folder: Path, payload: dict[str, Tensors], state: dict[str, Any], *, is_best: bool, keep: bool
) -> Path:
    """Write a checkpoint, point `latest` (and `best`) at it, and drop what is no longer wanted."""
    final = folder / f"{_PREFIX}{state['step']:08}"
    temporary = folder / f"{_TEMPORARY}{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, tensors in payload.items():
            save_file(tensors, temporary / f"{name}.safetensors")
        (temporary / STATE).write_text(json.dumps({**state, "keep": keep}, indent=2))
        for file in temporary.iterdir():
            _flush(file)
        _flush(temporary)
        if final.exists():  # the same step saved again, after a resume
            shutil.rmtree(final)
        temporary.rename(final)
        _point(folder / "latest", final)
        if is_best:
            _point(folder / "best", final)
        _flush(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            "the checkpoint cannot be written", where=str(final), got=error.strerror
        ) from error
    _prune(folder)
    return final


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint behind a run folder, its checkpoints folder, `latest`, `best` or a step folder."""
    folder = locate_checkpoint(path)
    if folder is None:
        raise CheckpointError("there is no checkpoint here", where=str(path))
    try:
        state = json.loads((folder / STATE).read_text())
        return Checkpoint(folder, {**state, "step": int(state["step"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "a checkpoint's state is unreadable", where=str(folder / STATE), got=str(error)
        ) from error


def remove_leftovers(folder: Path) -> None:
    """Clear away what a killed save left behind."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def _prune(folder: Path) -> None:
    """Drop every checkpoint that is neither latest, nor best, nor kept for ever."""
    pointed = {(folder / name).resolve() for name in ("latest", "best")}
    for path in folder.glob(f"{_PREFIX}*"):
        if path.resolve() not in pointed and not json.loads((path / STATE).read_text())["keep"]:
            shutil.rmtree(path)


def _point(link: Path, target: Path) -> None:
    """Replace a relative symbolic link in one move."""
    temporary = link.with_name(f"{_TEMPORARY}{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    temporary.replace(link)


def _flush(path: Path) -> None:
    """Make sure a file or folder entry has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
