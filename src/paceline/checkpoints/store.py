"""Checkpoints in their folder: committed by rename, pointed at, pruned, set aside when damaged. No torch.

Functions that read never rename or delete anything. `set_aside`, `prune` and `supersede_after` are for the owner of the
run folder alone: the checkpoint manager calls them.

A save has this order: write under a temporary name, flush to disk, read back and verify, rename to the step, point
`latest` (and `best`) at it, remove older ones. A checkpoint is renamed before it is removed. So a folder with the name
of a step is complete, and there is always a valid checkpoint.
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
    Damage,
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
from paceline.runs.patience import UnreadableNow, is_present, names_in, read_patiently
from paceline.settings.small_files import write_plain

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
    """Repeat an action once after a pause if the storage failed with a passing error. The action must be repeatable.

    For writes: a save that fails loses one checkpoint only. Reads are repeated for longer, by `read_patiently`.
    """
    try:
        return action()
    except (OSError, UnreadableNow) as error:
        cause = error.__cause__ if isinstance(error, UnreadableNow) else error
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
    write_plain(temporary / STATE, state_bytes)
    files = {**seals, STATE: FileSeal(len(state_bytes), add_checksum(state_bytes))}
    write_plain(temporary / MANIFEST, Manifest(dict(sorted(files.items())), about).to_bytes())
    for name in (STATE, MANIFEST):
        flush(temporary / name)
    flush(temporary)
    inspect_checkpoint(temporary)
    if checksum_of(temporary / STATE) != files[STATE].crc32:
        raise OSError(errno.EIO, f"{STATE} reads back as something else than was written")


def _give_name(temporary: Path) -> Path:
    """Rename the folder, which commits the checkpoint. An existing one of the same step is replaced."""
    final = temporary.with_name(temporary.name.removeprefix(_TEMPORARY))
    # A rename on a network file system may succeed and report an error. At a second try nothing is left to rename.
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


def commit_copy(temporary: Path, before_naming: Callable[[], None] = lambda: None) -> Path:
    """Give a folder that was copied from another place its name, after it is flushed and verified."""
    for path in [*temporary.iterdir(), temporary]:
        flush(path)
    verify(temporary)
    before_naming()
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
    """Verify a checkpoint completely and open it; one that is damaged or cannot be read is an error."""
    path = path.resolve()
    try:
        return read_patiently(f"reading {path.name}", path, partial(_verified, path))
    except DamagedCheckpoint as found:
        raise damaged_error(path, found) from found


def read_verified(path: Path) -> Checkpoint:
    """A checkpoint another rank has verified. On a shared disk it may take a moment until this machine sees it too."""

    def read() -> Checkpoint:
        deadline = time.monotonic() + _SIGHT_S
        while True:
            try:
                return Checkpoint(path, read_manifest(path), read_state(path))
            except DamagedCheckpoint as found:
                if time.monotonic() > deadline:
                    raise damaged_error(path, found) from found
            time.sleep(_SIGHT_POLL_S)

    return read_patiently(f"reading {path.name}", path, read)


def inspect_checkpoint(path: Path) -> Checkpoint:
    """Check a checkpoint without reading its tensors. Raises DamagedCheckpoint or UnreadableNow."""
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
        hint="update paceline" if is_newer else "--resume auto takes the newest complete one",
    )


@dataclass(frozen=True)
class Rejected:
    """A checkpoint whose bytes were read and are wrong."""

    path: Path
    damage: Damage

    def __str__(self) -> str:
        return f"checkpoint {self.path.name} is damaged ({self.damage})"


def find_newest(folder: Path, *, prefer_best: bool = False) -> tuple[Checkpoint | None, list[Rejected]]:
    """The newest complete checkpoint, and newer ones that are damaged. Changes nothing on the disk.

    Raises UnreadableNow if the folder or a newer checkpoint cannot be read: an older one is no substitute for it.
    """
    rejected: list[Rejected] = []
    for path in read_patiently("listing checkpoints", folder, lambda: _candidates(folder, prefer_best=prefer_best)):
        try:
            return read_patiently(f"reading {path.name}", path, partial(_verified, path)), rejected
        except NewerSchema as found:
            raise damaged_error(path, found) from found
        except DamagedCheckpoint as found:
            if read_patiently(f"reading {path.name}", path, partial(is_present, path)):  # a listing may be old
                rejected.append(Rejected(path, found.damage))
    return None, rejected


def _candidates(folder: Path, *, prefer_best: bool) -> list[Path]:
    """Step folders in the order in which they are tried."""
    latest, best = (pointed_at(folder, name) for name in ("latest", "best"))
    newest_first = sorted({*step_folders(folder), *([latest] if latest else [])}, key=step_of, reverse=True)
    if not prefer_best or best is None:
        return newest_first
    return [best, *(path for path in newest_first if path != best)]


def _verified(path: Path) -> Checkpoint:
    """Raises DamagedCheckpoint only if a second look finds damage too: a network file system may show an old size or
    an old listing for a moment."""
    try:
        return Checkpoint(path, verify(path), read_state(path))
    except NewerSchema:
        raise
    except DamagedCheckpoint:
        time.sleep(RETRY_PAUSE_S)
    return Checkpoint(path, verify(path), read_state(path))


def set_aside(path: Path) -> str:
    """Rename a damaged checkpoint so that it is not used; returns what was done. Only for the owner."""
    try:
        return f"moved to {_rename(path, _DAMAGED).name}"
    except OSError as error:
        return f"it could not be moved aside: {error.strerror}"


def _rename(path: Path, prefix: str) -> Path:
    """Rename a step folder, durably. An earlier folder of the new name is removed."""
    target = path.with_name(prefix + path.name)
    if target.exists():
        shutil.rmtree(target)
    path.rename(target)
    flush(path.parent)
    return target


def list_set_aside(folder: Path) -> list[Path]:
    """Damaged checkpoints, and checkpoints that a rewind to an earlier step has set aside."""
    return list_damaged(folder) + _with_prefix(folder, _SUPERSEDED)


def list_damaged(folder: Path) -> list[Path]:
    """Checkpoints that an owner has set aside as damaged."""
    return _with_prefix(folder, _DAMAGED)


def _with_prefix(folder: Path, prefix: str) -> list[Path]:
    try:
        return sorted(folder / name for name in names_in(folder) if name.startswith(f"{prefix}{STEP_PREFIX}"))
    except OSError as error:
        raise UnreadableNow(folder, error) from error


def supersede_after(folder: Path, step: int) -> None:
    """Set aside checkpoints after this step: the run returned to it and must not continue from a later one."""
    for path in step_folders(folder):
        if step_of(path) > step:
            with suppress(FileNotFoundError):  # a listing may be older than our own last rename
                _rename(path, _SUPERSEDED)


def prune(folder: Path, retention: Retention) -> None:
    """Remove checkpoints that no rule keeps. Call it after the newest was verified. Unreadable ones stay."""
    states = _readable_states(step_folders(folder))
    kept = choose_kept(states, retention)
    kept |= {path for name in ("latest", "best") for path in [pointed_at(folder, name)] if path is not None}
    superseded = _readable_states(_with_prefix(folder, _SUPERSEDED))
    dropped = [path for path in states if path not in kept]
    dropped += [path for path, state in superseded.items() if not state.get("keep")]
    for path in dropped:
        # Rename first: a process that is killed here must not leave an incomplete folder with the name of a step.
        with suppress(FileNotFoundError):  # a listing may be older than our own last rename
            shutil.rmtree(_rename(path, f"{_TEMPORARY}old-"))


def choose_kept(states: dict[_K, dict[str, Any]], retention: Retention) -> set[_K]:
    """Which checkpoints stay by the rules of `retention`. `states`: by path or name, newest first."""
    merits = {name: _merit(state) for name, state in states.items()}
    ranked = sorted((name for name in states if merits[name] > _NO_MERIT), key=lambda name: merits[name], reverse=True)
    kept = {*list(states)[: retention.keep_last], *ranked[: retention.keep_best]}
    kept |= {name for name, state in states.items() if state.get("keep")}
    audited = _newest_audited(states)
    if not audited:
        return kept
    # The run may go back to one of them, so the best one of that time stays, too.
    best_steps = [states[name].get("best_step") for name in kept | audited]
    return kept | audited | {name for name, state in states.items() if state.get("step") in best_steps}


def _newest_audited(states: dict[_K, dict[str, Any]]) -> set[_K]:
    """The newest checkpoint before the last audit without a finding: the run returns to it after a fault.

    `states`: newest first. Empty for a run without audits.
    """
    audited = next((state.get("audited") for state in states.values()), None)
    if not isinstance(audited, int) or audited == 0:
        return set()
    steps = {name: state.get("step") for name, state in states.items()}
    return set([name for name, step in steps.items() if isinstance(step, int) and step <= audited][:1])


_NO_MERIT = (-math.inf, -math.inf)


def _merit(state: dict[str, Any]) -> tuple[float, float]:
    try:
        validation = state["validation"]  # older versions have no other metric than accuracy
        merit = float(validation.get("merit", validation.get("accuracy"))), -float(validation["loss"])
    except (KeyError, TypeError, ValueError, AttributeError):  # saved inside an epoch, so without a validation
        return _NO_MERIT
    return _NO_MERIT if math.isnan(sum(merit)) else merit


def _readable_states(paths: list[Path]) -> dict[Path, dict[str, Any]]:
    """The states of readable checkpoints. Others are never removed: a rule may keep them."""
    states = {}
    for path in paths:
        with suppress(DamagedCheckpoint, UnreadableNow):
            states[path] = read_state(path)
    return states


def list_leftovers(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_TEMPORARY}*"))


def remove_leftovers(folder: Path, *, except_for: Path | None = None) -> None:
    """Remove the leftovers of a killed save. For the owner of the folder only."""
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
