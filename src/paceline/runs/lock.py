"""One owner per run folder, enforced by a lock that the kernel releases when its process ends.

The owner holds a flock on `run.lock` and writes its process and a random id into the file. A clean release empties the
file. A file with content but without a lock belongs to an owner that died: it is taken over with a note. Some file
systems lock within one host only. An owner on another host is taken over only if no file of the folder changes any
more. If the file system has no flock, `run.owner` is used instead. The first process creates it and removes it on
release. It is taken over only from an owner that is provably dead. The ranks of the previous owner are ended first
(`members.py`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import UserError
from paceline.runs.drafts import draft_of
from paceline.runs.machine import THIS_MACHINE, Machine, read_text
from paceline.runs.members import (
    SILENT_S,
    end_members,
    is_written_elsewhere,
    let_members_save,
    living_owner,
    require_real_members,
)
from paceline.runs.owner import LOCK, OWNER_FILE, Owner, new_owner, parse_owner
from paceline.settings.small_files import open_plain

_log = logging.getLogger("paceline")
_NO_FLOCK_HERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_NO_LINKS_HERE = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OWNER_WRITE_WAIT_S = 0.5  # a new owner writes its record shortly after it gets the lock
_POLL_S = 0.01
_held: set[int] = set()  # locked descriptors of this process


def _close_in_child() -> None:
    """A lock lasts until the last copy of its descriptor is closed. Close the copy in a forked child."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def owned(lock: Path, machine: Machine = THIS_MACHINE) -> Iterator[str]:
    """Lock a run folder. Yields the id of this ownership. Raises UserError at once if there is another owner."""
    owner = new_owner(machine)
    other_file = lock.with_name(OWNER_FILE)
    # Check this before the lock file is created. If the lock file of a running process was deleted, a new one would
    # make that process believe that it lost the folder.
    _refuse_living_member(lock.parent, machine)
    descriptor = _flocked(lock, machine)
    if descriptor is None:
        _refuse_living(lock, machine)  # another machine may be able to lock this file
        with _owner_file(other_file, owner, machine):
            yield owner.id
        return
    _held.add(descriptor)
    try:
        dead = read_text(lock)
        for path in (lock, other_file):
            _refuse_living(path, machine)
        let_members_save(lock.parent, machine)
        _write_owner(descriptor, owner)
        previous = parse_owner(dead)
        # If the named process is running, the lock file is a copy: nothing was taken over.
        if dead and (previous is None or not previous.is_visible_on(machine) or previous.is_dead_on(machine)):
            _log_takeover(previous or dead)
        end_members(lock.parent, owner.id, machine)
        yield owner.id
    finally:
        if _id_in(lock) == owner.id:  # otherwise the file names an owner on another host, or a dead one
            with suppress(OSError):  # the lock is released even if the folder can no longer be written
                os.ftruncate(descriptor, 0)
        _held.discard(descriptor)
        os.close(descriptor)


def refuse_if_owned(lock: Path, machine: Machine = THIS_MACHINE) -> None:
    """Check without taking the lock. Raises UserError if the owner is visibly alive."""
    _refuse_living_member(lock.parent, machine)
    for path in (lock, lock.with_name(OWNER_FILE)):
        owner = parse_owner(read_text(path))
        if owner is None or (owner.is_visible_on(machine) and owner.pid == machine.pid):
            continue
        if owner.is_visible_on(machine) and not owner.is_dead_on(machine):
            raise _refusal(path, str(owner))
        _refuse_living(path, machine)


def _refuse_living_member(folder: Path, machine: Machine) -> None:
    """The lock file may have been deleted or copied. Use the owner's record in `.members`."""
    require_real_members(folder)
    owner = living_owner(folder, machine)
    if owner is not None:
        raise _refusal(folder / LOCK, str(owner))


def _refuse_living(path: Path, machine: Machine) -> None:
    """For an owner on another machine, file changes are the only sign that it is alive."""
    owner = parse_owner(read_text(path))
    if owner is None or owner.is_visible_on(machine):
        return
    if is_written_elsewhere(path.parent, machine):
        ends = f"if it has ended, the folder is free {SILENT_S:.0f} s after its last heartbeat"
        raise _refusal(path, str(owner), hint=ends)


# --- With flock -------------------------------------------------------------------------------------------------------


def _flocked(lock: Path, machine: Machine) -> int | None:
    """A locked descriptor; None if the file system has no flock."""
    try:
        return _open_flocked(lock, machine)
    except OSError as error:
        if error.errno in _NO_FLOCK_HERE:
            return None
        raise UserError(
            "the run folder cannot be written", where=str(lock), got=error.strerror, hint="--output-dir PATH"
        ) from error


def _open_flocked(lock: Path, machine: Machine) -> int:
    """Lock the file that has this name now. Raises UserError if another process holds the lock."""
    while True:
        descriptor = open_plain(lock, os.O_RDWR | os.O_APPEND)
        try:
            machine.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(descriptor, lock):  # otherwise the file was replaced meanwhile: lock the new one
                return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise _refusal(lock, _read_living_owner(lock, machine)) from error
            raise
        os.close(descriptor)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _read_living_owner(path: Path, machine: Machine) -> str:
    """The owner that holds the lock. The file may still name a dead owner for a moment after a takeover."""

    def living() -> str | None:
        text = read_text(path)
        owner = parse_owner(text)
        return None if not text or (owner is not None and owner.is_dead_on(machine)) else str(owner or text)

    return _wait_for(living, machine) or "an unknown owner"


# --- Without flock ----------------------------------------------------------------------------------------------------


@contextmanager
def _owner_file(path: Path, owner: Owner, machine: Machine) -> Iterator[None]:
    _log.info("note: this file system has no locks; %s names the owner of the run folder", path)
    _create_owner_file(path, owner, machine)
    try:
        end_members(path.parent, owner.id, machine)
        yield
    finally:
        if _id_in(path) == owner.id:
            path.unlink(missing_ok=True)


def _create_owner_file(path: Path, owner: Owner, machine: Machine) -> None:
    try:
        _create_with_owner(path, owner, machine)
    except FileExistsError:
        _take_over(path, owner, machine)


def _create_with_owner(path: Path, owner: Owner, machine: Machine) -> None:
    """Create the file with its content in one step. Raises FileExistsError.

    An empty file, left by a kill or a power loss, would name no owner whose death could be checked.
    """
    draft = draft_of(path, machine.pid)
    try:
        descriptor = open_plain(draft, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(descriptor, owner.to_json().encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.link(draft, path)
    except OSError as error:
        if error.errno not in (*_NO_LINKS_HERE, *_FULL):
            raise
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _write_owner(descriptor, owner)
        os.close(descriptor)
    finally:
        draft.unlink(missing_ok=True)


def _take_over(path: Path, owner: Owner, machine: Machine) -> None:
    """Replace the file of a dead owner. The guard file lets only one process do it."""
    _require_dead(path, machine)
    guard = path.with_suffix(".takeover")
    interrupted = parse_owner(read_text(guard))
    if interrupted is not None and interrupted.is_dead_on(machine):
        guard.unlink(missing_ok=True)  # left by a killed takeover; if two processes remove it, the id decides
    try:
        _create_with_owner(guard, owner, machine)
    except FileExistsError:
        newcomer = _wait_for(lambda: None if guard.exists() else read_text(path), machine)
        other = str(parse_owner(newcomer) or "a process that is taking it over")
        raise _refusal(path, other, hint=_remove(guard)) from None
    try:
        dead = _require_dead(path, machine)  # check again: another process may have been faster
        let_members_save(path.parent, machine)
        guard.replace(path)
    except BaseException:
        guard.unlink(missing_ok=True)
        raise
    _log_takeover(dead)


def _require_dead(path: Path, machine: Machine) -> Owner:
    owner = parse_owner(_wait_for(lambda: read_text(path) or None, machine))
    if owner is None or not owner.is_dead_on(machine):
        raise _refusal(path, str(owner or "an unknown owner"), hint=_remove(path))
    _refuse_living(path, machine)
    return owner


# --- Shared -----------------------------------------------------------------------------------------------------------


def _refusal(path: Path, owner: str, *, hint: str = "") -> UserError:
    lines = ["wait for it, stop it, or give another --output-dir", hint]
    return UserError(
        "another process is writing to this run folder",
        where=str(path.parent),
        got=owner,
        hint="\n".join(line for line in lines if line),
    )


def _remove(path: Path) -> str:
    return f"if it has ended (this machine cannot check that): rm {path}"


def _log_takeover(dead: Owner | str) -> None:
    # A warning: if logging is not set up yet, Python prints it on standard error.
    _log.warning("note: the previous owner, %s, ended without releasing this run folder; taking it over", dead)


def _write_owner(descriptor: int, owner: Owner) -> None:
    """Ignore write errors: on a full disk the lock itself still protects the folder."""
    os.ftruncate(descriptor, 0)
    with suppress(OSError):
        os.write(descriptor, owner.to_json().encode())


def _id_in(path: Path) -> str:
    owner = parse_owner(read_text(path))
    return owner.id if owner else ""


def _wait_for(answer: Callable[[], str | None], machine: Machine) -> str | None:
    """Poll for what another process is about to write; None after the time limit."""
    deadline = machine.now_s() + _OWNER_WRITE_WAIT_S
    while not (found := answer()) and machine.now_s() < deadline:
        machine.sleep(_POLL_S)
    return found
