"""Checkpoints in their folder: committed by rename, pointed at, pruned, set aside when damaged. No torch.

A checkpoint is written under a temporary name; when all of it has reached the disk it is read back and verified,
renamed to its step, then `latest` (and `best`) are pointed at it, and only then are older ones dropped. What is
dropped loses its name first. So a folder with a step's name is whole, and there is always a good one.
"""

from __future__ import annotations

import errno
import logging
import math
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoints.format import (
    MANIFEST,
    REPLACED_PREFIX,
    STATE,
    STEP_PREFIX,
    DamagedCheckpoint,
    FileSeal,
    Manifest,
    NewerSchema,
    add_checksum,
    check_headers,
    check_sizes,
    checksum_of,
    is_step_name,
    read_manifest,
    read_state,
    step_folders,
    step_of,
    verify,
)
from paceline.errors import CheckpointError
from paceline.runs.folder import flush

_log = logging.getLogger("paceline")
_TEMPORARY, _DAMAGED, _SUPERSEDED = ".tmp-", "damaged-", "superseded-"
# What a network file system says when a server was busy or a cached handle is too old: soon it may work again.
_PASSING = (errno.EIO, errno.ESTALE)
RETRY_PAUSE_S = 0.5
_SIGHT_S, _SIGHT_POLL_S = 5.0, 0.1  # how long a machine may not see what another has written
_T = TypeVar("_T")
_K = TypeVar("_K")


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


def with_one_retry(what: str, action: Callable[[], _T]) -> _T:
    """Do something that can be done twice, and once more after a pause if the storage only stumbled."""
    try:
        return action()
    except (OSError, DamagedCheckpoint) as error:
        cause = error.__cause__ if isinstance(error, DamagedCheckpoint) else error
        if not isinstance(cause, OSError) or cause.errno not in _PASSING:
            raise
        _log.warning("warning: %s: %s; trying once more in %.1f s", what, cause.strerror or cause, RETRY_PAUSE_S)
    time.sleep(RETRY_PAUSE_S)
    return action()


def temporary_folder(folder: Path, step: int) -> Path:
    return folder / f"{_TEMPORARY}{STEP_PREFIX}{step:08}"


def commit(temporary: Path, seals: dict[str, FileSeal], state_bytes: bytes, about: dict[str, Any]) -> Path:
    """Seal a temporary folder whose payload is written and was read back, and give it its name."""
    with_one_retry("sealing a checkpoint", lambda: _seal_folder(temporary, seals, state_bytes, about))
    return with_one_retry("naming a checkpoint", lambda: _give_name(temporary))


def _seal_folder(temporary: Path, seals: dict[str, FileSeal], state_bytes: bytes, about: dict[str, Any]) -> None:
    (temporary / STATE).write_bytes(state_bytes)
    files = {**seals, STATE: FileSeal(len(state_bytes), add_checksum(state_bytes))}
    (temporary / MANIFEST).write_bytes(Manifest(dict(sorted(files.items())), about).to_bytes())
    for name in (STATE, MANIFEST):
        flush(temporary / name)
    flush(temporary)
    inspect_checkpoint(temporary)
    if checksum_of(temporary / STATE) != files[STATE].crc32:
        raise OSError(errno.EIO, f"{STATE} reads back as something else than was written")


def _give_name(temporary: Path) -> Path:
    """From here on a checkpoint is visible. One of the same step, of before a resume, makes room for it."""
    final = temporary.with_name(temporary.name.removeprefix(_TEMPORARY))
    # A rename over a network may be done and reported as failed: at a second try there is nothing left to rename.
    if temporary.exists() or not final.exists():
        if final.exists():
            _rename(final, REPLACED_PREFIX)
        temporary.rename(final)
    flush(final.parent)
    settle_replaced(final.parent)
    return final


def settle_replaced(folder: Path) -> None:
    """Drop checkpoints that were replaced by a new one of their step. One without a successor gets its name back."""
    for path in sorted(folder.glob(f"{REPLACED_PREFIX}{STEP_PREFIX}*")):
        final = path.with_name(path.name.removeprefix(REPLACED_PREFIX))
        if final.exists():
            shutil.rmtree(path)
        else:
            path.rename(final)
            flush(folder)


def take_in(temporary: Path) -> Path:
    """Give a temporary folder that was filled from elsewhere its name, once all of it is on disk and verified."""
    for path in [*temporary.iterdir(), temporary]:
        flush(path)
    verify(temporary)
    return _give_name(temporary)


def point(folder: Path, name: str, target: Path) -> None:
    """Replace a relative link in one move."""
    temporary = folder / f"{_TEMPORARY}{name}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    try:
        temporary.replace(folder / name)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    flush(folder)


def pointed_at(folder: Path, name: str) -> Path | None:
    """The step folder behind `latest` or `best`; never one outside of this folder.

    Looked up by its name: a listing over a network may be seconds old.
    """
    link = folder / name
    target = str(link.readlink()) if link.is_symlink() else ""
    is_there = is_step_name(target) and (folder / target).is_dir() and not (folder / target).is_symlink()
    return folder / target if is_there else None


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify a checkpoint completely and open it; one that is damaged is an error."""
    path = path.resolve()
    try:
        return with_one_retry(f"reading {path.name}", lambda: _verified(path))
    except DamagedCheckpoint as found:
        raise damaged_error(path, found) from found


def read_as_told(path: Path) -> Checkpoint:
    """A checkpoint another rank has verified. On a shared disk it may take a moment until this machine sees it too."""
    deadline = time.monotonic() + _SIGHT_S
    while True:
        try:
            return Checkpoint(path, read_manifest(path), read_state(path))
        except DamagedCheckpoint as found:
            if time.monotonic() > deadline:
                raise damaged_error(path, found) from found
        time.sleep(_SIGHT_POLL_S)


def inspect_checkpoint(path: Path) -> Checkpoint:
    """All that can be said of a checkpoint without reading its tensors. Raises DamagedCheckpoint."""
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    check_headers(path, manifest)
    return Checkpoint(path, manifest, read_state(path))


def damaged_error(path: Path, found: DamagedCheckpoint) -> CheckpointError:
    is_newer = isinstance(found, NewerSchema)
    return CheckpointError(
        "the checkpoint was written by a newer Paceline" if is_newer else "the checkpoint is damaged and was not used",
        where=str(path / found.damage.file),
        got=found.damage.got,
        allowed=found.damage.expected,
        hint="update paceline" if is_newer else "--resume auto takes the newest that is whole",
    )


def find_newest(folder: Path, *, prefer_best: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole. Damaged ones on the way are set aside and reported."""
    reports: list[str] = []
    try:
        listed = with_one_retry("listing checkpoints", lambda: step_folders(folder))
        latest, best = (pointed_at(folder, name) for name in ("latest", "best"))
    except OSError as error:  # not taken for an empty folder: that would start the run from its beginning
        raise CheckpointError("checkpoints cannot be listed", where=str(folder), got=error.strerror) from error
    candidates = sorted({*listed, *([latest] if latest else [])}, key=step_of, reverse=True)
    if prefer_best and best is not None:
        candidates = [best, *(path for path in candidates if path != best)]
    for path in candidates:
        try:
            return with_one_retry(f"reading {path.name}", partial(_verified, path)), reports
        except NewerSchema as found:
            raise damaged_error(path, found) from found
        except DamagedCheckpoint as found:
            reports.append(f"checkpoint {path.name} is damaged ({found.damage}); {_set_aside(path)}")
    return None, reports


def _verified(path: Path) -> Checkpoint:
    return Checkpoint(path, verify(path), read_state(path))


def _set_aside(path: Path) -> str:
    """Rename a damaged checkpoint so that nobody takes it for a good one; says what was done."""
    try:
        return f"moved to {_rename(path, _DAMAGED).name}"
    except OSError as error:  # somebody else's run, which we may only read
        return f"it could not be moved aside: {error.strerror}"


def _rename(path: Path, prefix: str) -> Path:
    """Take a step folder's name away, on the disk too; an older one that went the same way gives way."""
    target = path.with_name(prefix + path.name)
    if target.exists():
        shutil.rmtree(target)
    path.rename(target)
    flush(path.parent)
    return target


@dataclass(frozen=True)
class Listed:
    """A checkpoint as a table shows it."""

    path: Path
    manifest: Manifest | None
    state: dict[str, Any]
    damage: DamagedCheckpoint | None


def list_checkpoints(folder: Path, *, thorough: bool) -> list[Listed]:
    """Every checkpoint, oldest first, and what is wrong with it: sizes and manifests, or every bit."""
    listed = []
    for path in reversed(step_folders(folder)):
        manifest, state, damage = None, {}, None
        try:
            manifest = read_manifest(path)
            state = inspect_checkpoint(path).state
            if thorough:
                verify(path)
        except DamagedCheckpoint as found:
            damage = found
        listed.append(Listed(path, manifest, state, damage))
    return listed


def list_set_aside(folder: Path) -> list[Path]:
    """Damaged checkpoints, and ones that a run left behind when it went back to an earlier step."""
    return sorted(path for prefix in (_DAMAGED, _SUPERSEDED) for path in folder.glob(f"{prefix}{STEP_PREFIX}*"))


def supersede_after(folder: Path, step: int, *, keep: Path | None = None) -> None:
    """A run that went back to this step must never again go on from a later one of before; `keep` is of after."""
    for path in step_folders(folder):
        if step_of(path) > step and path != keep:
            with suppress(FileNotFoundError):  # a listing may be older than our own last rename
                _rename(path, _SUPERSEDED)


def prune(folder: Path, retention: Retention) -> None:
    """Drop what nobody wants any more. Call it only after the newest one was verified."""
    states = {path: state for path in step_folders(folder) if (state := _state_or_none(path)) is not None}
    kept = choose_kept(states, retention)
    kept |= {path for name in ("latest", "best") for path in [pointed_at(folder, name)] if path is not None}
    superseded = [path for path in folder.glob(f"{_SUPERSEDED}*") if not (_state_or_none(path) or {}).get("keep")]
    for path in [*(path for path in states if path not in kept), *superseded]:
        # Killed halfway, this must not leave half a checkpoint under its name.
        with suppress(FileNotFoundError):  # a listing may be older than our own last rename
            shutil.rmtree(_rename(path, f"{_TEMPORARY}old-"))


def choose_kept(states: dict[_K, dict[str, Any]], retention: Retention) -> set[_K]:
    """Which of these checkpoints stay by their own merit; given newest first, by whatever names them."""
    merits = {name: _merit(state) for name, state in states.items()}
    ranked = sorted((name for name in states if merits[name] > _NO_MERIT), key=lambda name: merits[name], reverse=True)
    kept = {*list(states)[: retention.keep_last], *ranked[: retention.keep_best]}
    return kept | {name for name, state in states.items() if state.get("keep")}


_NO_MERIT = (-1.0, -math.inf)


def _merit(state: dict[str, Any]) -> tuple[float, float]:
    try:
        merit = float(state["validation"]["accuracy"]), -float(state["validation"]["loss"])
    except (KeyError, TypeError, ValueError):  # saved inside an epoch, as most of them
        return _NO_MERIT
    return _NO_MERIT if math.isnan(sum(merit)) else merit


def _state_or_none(path: Path) -> dict[str, Any] | None:
    try:
        return read_state(path)
    except DamagedCheckpoint:
        return None


def adopt_best(source: Path, folder: Path, step: int) -> None:
    """Point `best` at the checkpoint a resumed state calls its best, taken along if it lies in another folder.

    A killed save may have left the link on the one before; a run that went back, on one that is no longer its own.
    Where the best was never saved for want of room, the link stays on the best that was.
    """
    best = source / f"{STEP_PREFIX}{step:08}"
    if source.resolve() != folder.resolve() and (best / MANIFEST).exists():
        best = _copy(best, folder) or best
    if best.parent.resolve() == folder.resolve() and (best / MANIFEST).exists():
        if pointed_at(folder, "best") != folder / best.name:
            point(folder, "best", best)
        return
    current = pointed_at(folder, "best")
    if current is not None and step_of(current) <= step:
        return
    (folder / "best").unlink(missing_ok=True)
    if step > 0:
        _log.warning("warning: the best checkpoint so far, of step %d, is not there any more", step)


def _copy(path: Path, folder: Path) -> Path | None:
    """A checkpoint in another folder, verified there before it gets its name; None if that cannot be."""
    temporary = temporary_folder(folder, step_of(path))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        manifest = inspect_checkpoint(path).manifest
        temporary.mkdir(parents=True)
        for name in (*manifest.files, MANIFEST):
            shutil.copyfile(path / name, temporary / name, follow_symlinks=False)
        return take_in(temporary)
    except (DamagedCheckpoint, OSError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        _log.warning("warning: the best checkpoint %s was not taken along: %s", path, error)
        return None


def list_leftovers(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_TEMPORARY}*"))


def remove_leftovers(folder: Path, *, except_for: Path | None = None) -> None:
    """Clear away what a killed save left behind. For the owner of the folder only."""
    settle_replaced(folder)
    for path in list_leftovers(folder):
        if path == except_for:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
