"""Frees the disk space of a run: what can be deleted, and the deletion. Nothing outside of run folders is deleted.

By default, checkpoints that are not needed are deleted. A finished run keeps its best one. A run that may be resumed
keeps its best and its newest. Results, metrics and logs stay. A whole run is deleted only if the user asks for it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.checkpoints.format import DamagedCheckpoint, step_folders, verify
from paceline.checkpoints.store import inspect_checkpoint, list_leftovers, list_set_aside, point, pointed_at
from paceline.errors import UserError
from paceline.runs.catalog import LIVING, RunEntry, read_entry
from paceline.runs.folder import RunFolder

_GOING = ".removing-"  # a run is renamed before it is removed, so an incomplete folder never looks like a run


@dataclass(frozen=True)
class Reclaim:
    """One run, and what of it would go."""

    entry: RunEntry
    folders: tuple[Path, ...]  # the run's folder itself, or things in its checkpoints folder
    size_bytes: int
    kept: str  # in words
    is_whole: bool

    @property
    def is_nothing(self) -> bool:
        return not self.folders


def plan_reclaim(entry: RunEntry, *, whole: bool, thorough: bool = False) -> Reclaim:
    """Raises UserError for a run that must not be touched. `thorough`: every bit of what stays is verified."""
    _refuse_living(entry)
    if entry.path.is_symlink() and whole:
        target = f"it is a link to {entry.path.resolve()}"
        raise UserError("this is not the run's own folder", where=str(entry.path), got=target, hint="name that folder")
    if whole:
        return Reclaim(entry, (entry.path,), _size_of(entry.path), "nothing", is_whole=True)
    checkpoints = RunFolder(entry.path).checkpoints
    if checkpoints.is_symlink():  # on another disk; perhaps another person made the link
        return Reclaim(entry, (), 0, "checkpoints, a link to elsewhere", is_whole=False)
    steps = step_folders(checkpoints)
    wanted = _wanted(checkpoints, steps, needs_newest=entry.state != "finished", thorough=thorough)
    gone = [*(path for path in steps if path not in wanted), *list_set_aside(checkpoints)] if wanted else []
    gone += list_leftovers(checkpoints)
    none_whole = "checkpoints, of which none is complete" if steps or list_set_aside(checkpoints) else "no checkpoint"
    kept = " and ".join(sorted(path.name for path in wanted)) or none_whole
    return Reclaim(entry, tuple(gone), sum(map(_size_of, gone)), kept, is_whole=False)


def _wanted(checkpoints: Path, steps: list[Path], *, needs_newest: bool, thorough: bool) -> set[Path]:
    """The best or else the newest checkpoint, and the newest if the run may be resumed. Damaged ones do not count."""

    def is_whole(path: Path) -> bool:
        try:
            if thorough:
                verify(path)
            else:
                inspect_checkpoint(path)
        except DamagedCheckpoint:
            return False
        return True

    best = pointed_at(checkpoints, "best")
    whole_best = best if best is not None and is_whole(best) else None
    newest = next(filter(is_whole, steps), None) if needs_newest or whole_best is None else None
    return {path for path in (whole_best, newest) if path is not None}


def _refuse_living(entry: RunEntry) -> None:
    if entry.state in LIVING:
        raise UserError(
            f"this run may be under way ({entry.state})",
            where=str(entry.path),
            got=entry.owner or None,
            hint=f"paceline status {entry.path}; paceline cancel {entry.path}",
        )


def reclaim(plan: Reclaim) -> int:
    """Remove it, holding the run's lock: a start of the run is refused meanwhile. Returns the bytes."""
    folder = RunFolder(plan.entry.path)
    try:
        with folder.owned():
            # The run may have continued and ended while the user was answering. It is not running: we hold its lock.
            now = read_entry(folder.path)
            settled = replace(now, state="lost") if now.state in LIVING else now
            fresh = plan_reclaim(settled, whole=plan.is_whole, thorough=True)
            for path in fresh.folders:
                _remove(path)
            if not fresh.is_whole:
                _point_again(folder.checkpoints)
    except OSError as error:
        raise UserError("it could not be removed", where=str(folder.path), got=error.strerror) from error
    return fresh.size_bytes


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    going = path.with_name(f"{_GOING}{path.name}")
    if going.exists():
        shutil.rmtree(going)
    path.rename(going)
    shutil.rmtree(going)


def _point_again(checkpoints: Path) -> None:
    """`latest` of a run that keeps only its best would point at nothing."""
    steps = step_folders(checkpoints)
    if steps and pointed_at(checkpoints, "latest") is None:
        point(checkpoints, "latest", steps[0])


def _size_of(path: Path) -> int:
    """Of all files in it; links are counted as links."""
    total = path.lstat().st_size if path.exists() or path.is_symlink() else 0
    if path.is_symlink() or not path.is_dir():
        return total
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            try:
                total += os.lstat(Path(folder) / name).st_size
            except OSError:
                continue
    return total
