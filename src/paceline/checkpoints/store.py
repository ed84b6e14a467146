"""Checkpoints in their folder: committed by rename, pointed at, pruned, set aside when damaged. No torch.

A checkpoint is written under a temporary name; when all of it has reached the disk it is renamed to its step, then
`latest` (and `best`) are pointed at it, then it is read back and verified, and only then are older ones dropped. So
a folder with a step's name is whole, and there is always a good one.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.format import (
    MANIFEST,
    STATE,
    STEP_PREFIX,
    DamagedCheckpoint,
    FileSeal,
    Manifest,
    check_sizes,
    checksum_of,
    read_manifest,
    read_state,
    step_folders,
    verify,
)
from paceline.errors import CheckpointError

_TEMPORARY, _DAMAGED = ".tmp-", "damaged-"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint whose manifest was read."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def files_of(self, kind: str) -> list[str]:
        return sorted(name for name in self.manifest.files if name.split(".")[0].split("-")[0] == kind)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest few, the best few, and those marked to be kept."""

    keep_last: int = 1
    keep_best: int = 1


def temporary_folder(folder: Path, step: int) -> Path:
    return folder / f"{_TEMPORARY}{STEP_PREFIX}{step:08}"


def commit(temporary: Path, seals: dict[str, FileSeal], state_bytes: bytes, about: dict[str, Any]) -> Path:
    """Seal a temporary folder whose payload is written, and give it its name."""
    (temporary / STATE).write_bytes(state_bytes)
    files = {**seals, STATE: FileSeal(len(state_bytes), checksum_of(temporary / STATE))}
    (temporary / MANIFEST).write_bytes(Manifest(dict(sorted(files.items())), about).to_bytes())
    for name in (STATE, MANIFEST):
        flush(temporary / name)
    flush(temporary)
    final = temporary.with_name(temporary.name.removeprefix(_TEMPORARY))
    if final.exists():  # the same step saved again, after a resume
        shutil.rmtree(final)
    temporary.rename(final)
    flush(final.parent)
    return final


def point(folder: Path, name: str, target: Path) -> None:
    """Replace a relative link in one move."""
    temporary = folder / f"{_TEMPORARY}{name}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    temporary.replace(folder / name)
    flush(folder)


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify a checkpoint completely and open it; one that is damaged is an error."""
    path = path.resolve()
    try:
        manifest = verify(path)
        return Checkpoint(path, manifest, read_state(path))
    except DamagedCheckpoint as found:
        raise damaged_error(path, found) from found


def damaged_error(path: Path, found: DamagedCheckpoint) -> CheckpointError:
    return CheckpointError(
        "the checkpoint is damaged and was not used",
        where=str(path / found.damage.file),
        got=found.damage.got,
        allowed=found.damage.expected,
        hint="--resume auto takes the newest that is whole",
    )


def find_newest(folder: Path, *, prefer_best: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole. Damaged ones on the way are set aside and reported."""
    reports: list[str] = []
    candidates = step_folders(folder)
    best = folder / "best"
    if prefer_best and best.exists():
        candidates = [best.resolve(), *candidates]
    for path in candidates:
        try:
            return Checkpoint(path, verify(path), read_state(path)), reports
        except DamagedCheckpoint as found:
            aside = set_aside(path)
            reports.append(f"checkpoint {path.name} is damaged ({found.damage}); moved to {aside.name}")
    return None, reports


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that nobody takes it for a good one."""
    aside = path.with_name(_DAMAGED + path.name)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    return aside


def list_checkpoints(folder: Path, *, thorough: bool) -> list[tuple[Path, Manifest | None, dict[str, Any], str]]:
    """Every checkpoint, oldest first, with its verdict: "ok", or what is wrong with it."""
    rows: list[tuple[Path, Manifest | None, dict[str, Any], str]] = []
    for path in reversed(step_folders(folder)):
        manifest, state, verdict = None, {}, "ok"
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
            state = read_state(path)
            if thorough:
                verify(path)
        except DamagedCheckpoint as found:
            verdict = str(found.damage)
        rows.append((path, manifest, state, verdict))
    return rows


def prune(folder: Path, retention: Retention) -> None:
    """Drop what nobody wants any more. Call it only after the newest one was verified."""
    paths = step_folders(folder)
    states = {path: _state_or_none(path) for path in paths}
    good = [path for path in paths if states[path] is not None]
    ranked = sorted(good, key=lambda path: _merit(states[path] or {}), reverse=True)
    kept = set(good[: retention.keep_last])
    kept |= {path for path in ranked[: retention.keep_best] if _merit(states[path] or {}) > _NO_MERIT}
    kept |= {path for path in good if (states[path] or {}).get("keep")}
    kept |= {(folder / name).resolve() for name in ("latest", "best") if (folder / name).exists()}
    for path in good:
        if path.resolve() not in {item.resolve() for item in kept}:
            shutil.rmtree(path)


_NO_MERIT = (-1.0, float("-inf"))


def _merit(state: dict[str, Any]) -> tuple[float, float]:
    found = state.get("validation")
    return (found["accuracy"], -found["loss"]) if found else _NO_MERIT


def _state_or_none(path: Path) -> dict[str, Any] | None:
    try:
        return read_state(path)
    except DamagedCheckpoint:
        return None


def remove_leftovers(folder: Path) -> None:
    """Clear away what a killed save left behind."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def flush(path: Path) -> None:
    """Make sure a file or folder entry has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
