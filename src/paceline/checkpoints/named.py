"""Finds a checkpoint by name (best, latest, a step, or a folder), and lists those of a run. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.format import (
    MANIFEST,
    STEP_PREFIX,
    DamagedCheckpoint,
    Manifest,
    read_manifest,
    step_folders,
    verify,
)
from paceline.checkpoints.store import inspect_checkpoint
from paceline.errors import UserError
from paceline.runs.folder import require_run_folder
from paceline.runs.patience import UnreadableNow


@dataclass(frozen=True)
class NamedCheckpoint:
    """Where to find a checkpoint, and the run it belongs to."""

    source: Path  # a checkpoint folder, or a run folder: its best or newest complete one is used
    prefer_best: bool
    run: Path | None  # the run folder around it; None for a checkpoint without its run


def find_named(path: Path, name: str | int = "") -> NamedCheckpoint:
    """`path` is a run folder or a checkpoint folder; `name` chooses one of a run: best, latest or a step."""
    if (path / MANIFEST).is_file():
        if name:
            raise UserError("this is one checkpoint already", where=str(path), got=f"--checkpoint {name}")
        folder = path.resolve()  # `best` and `latest` are links
        run = folder.parent.parent
        is_in_run = folder.parent.name == "checkpoints" and (run / "config.yaml").is_file()
        return NamedCheckpoint(folder, False, run if is_in_run else None)
    require_run_folder(path)
    if name in ("", "best", "latest"):
        return NamedCheckpoint(path, name != "latest", path)
    return NamedCheckpoint(_of_step(path, str(name)), False, path)


def _of_step(run: Path, name: str) -> Path:
    number = name.removeprefix(STEP_PREFIX)
    folders = step_folders(run / "checkpoints")
    wanted = f"{STEP_PREFIX}{int(number):08}" if number.isdecimal() else ""
    found = next((folder for folder in folders if folder.name == wanted), None)
    if found is None:
        steps = sorted(int(folder.name.removeprefix(STEP_PREFIX)) for folder in folders)
        raise UserError(
            "this run has no such checkpoint",
            where=str(run),
            got=name,
            allowed=", ".join(["best", "latest", *map(str, steps)]),
        )
    return found


@dataclass(frozen=True)
class Listed:
    """A checkpoint as a table shows it."""

    path: Path
    manifest: Manifest | None
    state: dict[str, Any]
    damage: DamagedCheckpoint | None
    unreadable: UnreadableNow | None = None


def list_checkpoints(folder: Path, *, thorough: bool) -> list[Listed]:
    """Every checkpoint, oldest first, and what is wrong with it: sizes and manifests, or every bit."""
    listed = []
    for path in reversed(step_folders(folder)):
        manifest, state, damage, unreadable = None, {}, None, None
        try:
            manifest = read_manifest(path)
            state = inspect_checkpoint(path).state
            if thorough:
                verify(path)
        except DamagedCheckpoint as found:
            damage = found
        except UnreadableNow as found:
            unreadable = found
        listed.append(Listed(path, manifest, state, damage, unreadable))
    return listed
