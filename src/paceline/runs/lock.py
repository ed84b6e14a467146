"""One owner per run folder, by a lock that dies with its process.

`run.lock` is flocked and says who holds it, with a random id. A clean release empties the file. So a file with words in
it and no lock on it belongs to an owner that died, and is taken over with a note. Some file systems lock within one
host only: an owner on another host is taken over only when nothing in the folder shows a sign of life. Where the file
system has no flock, `run.owner` stands in: created by the first process, removed on release, and taken over only from
an owner that is provably dead. The ranks of the owner before end first (`members.py`).
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
_WORDS_WAIT_S = 0.5  # a winner writes its name within a moment of winning
_POLL_S = 0.01
_held: set[int] = set()  # locked descriptors of this process


def _close_in_child() -> None:
    """A lock lasts until the last copy of its descriptor is closed: a forked child must not keep it."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def owned(lock: Path, machine: Machine = THIS_MACHINE) -> Iterator[str]:
    """Hold a run folder by its lock file; a second owner is refused at once. Gives the id of this ownership."""
    owner = new_owner(machine)
    other_file = lock.with_name(OWNER_FILE)
    # Before the lock file is made: a new one would tell a living run, whose own was deleted, that it lost the folder.
    _refuse_living_member(lock.parent, machine)
    descriptor = _flocked(lock, machine)
    if descriptor is None:
        _refuse_living(lock, machine)  # of another machine, where the same file can be locked
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
        words = parse_owner(dead)
        if dead and (words is None or not words.is_visible_on(machine) or words.is_dead_on(machine)):
            _tell_of_takeover(words or dead)  # a free lock with the words of a living process was copied
        end_members(lock.parent, owner.id, machine)
        yield owner.id
    finally:
        if _id_in(lock) == owner.id:  # else these are words of an owner on another host, or of one that died
            with suppress(OSError):  # a folder that can no longer be written still loses its lock
                os.ftruncate(descriptor, 0)
        _held.discard(descriptor)
        os.close(descriptor)


def refuse_if_owned(lock: Path, machine: Machine = THIS_MACHINE) -> None:
    """An early answer that takes no lock: refuses if the owner is seen to be alive."""
    _refuse_living_member(lock.parent, machine)
    for path in (lock, lock.with_name(OWNER_FILE)):
        owner = parse_owner(read_text(path))
        if owner is None or (owner.is_visible_on(machine) and owner.pid == machine.pid):
            continue
        if owner.is_visible_on(machine) and not owner.is_dead_on(machine):
            raise _refusal(path, str(owner))
        _refuse_living(path, machine)


def _refuse_living_member(folder: Path, machine: Machine) -> None:
    """The lock file can be deleted, or copied. The owner's own record tells of it all the same."""
    require_real_members(folder)
    owner = living_owner(folder, machine)
    if owner is not None:
        raise _refusal(folder / LOCK, str(owner))


def _refuse_living(path: Path, machine: Machine) -> None:
    """Of an owner that this machine cannot see, only the files tell whether it lives."""
    owner = parse_owner(read_text(path))
    if owner is None or owner.is_visible_on(machine):
        return
    if is_written_elsewhere(path.parent, machine):
        ends = f"if it runs no more, it is taken over {SILENT_S:.0f} s after its last sign of life"
        raise _refusal(path, str(owner), hint=ends)


# --- With flock -------------------------------------------------------------------------------------------------------


def _flocked(lock: Path, machine: Machine) -> int | None:
    """A locked descriptor; None where the file system knows no such lock."""
    try:
        return _open_flocked(lock, machine)
    except OSError as error:
        if error.errno in _NO_FLOCK_HERE:
            return None
        raise UserError(
            "the run folder cannot be written", where=str(lock), got=error.strerror, hint="--output-dir PATH"
        ) from error


def _open_flocked(lock: Path, machine: Machine) -> int:
    """A descriptor that holds the lock of the file that has this name now. Raises UserError if it is taken."""
    while True:
        descriptor = open_plain(lock, os.O_RDWR | os.O_APPEND)
        try:
            machine.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(descriptor, lock):  # else it was deleted meanwhile, and another process may lock a new one
                return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise _refusal(lock, _who_has(lock, machine)) from error
            raise
        os.close(descriptor)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _who_has(path: Path, machine: Machine) -> str:
    """The words of the living owner. It may have won so lately that those of a dead one still stand here."""

    def living() -> str | None:
        text = read_text(path)
        owner = parse_owner(text)
        return None if not text or (owner is not None and owner.is_dead_on(machine)) else str(owner or text)

    return _wait_for(living, machine) or "an unknown owner"


# --- Without --------------------------------------------------------------------------------------------------------


@contextmanager
def _owner_file(path: Path, owner: Owner, machine: Machine) -> Iterator[None]:
    _log.info("note: this file system has no locks; %s says whose run folder this is", path)
    _create_owner_file(path, owner, machine)
    try:
        end_members(path.parent, owner.id, machine)
        yield
    finally:
        if _id_in(path) == owner.id:
            path.unlink(missing_ok=True)


def _create_owner_file(path: Path, owner: Owner, machine: Machine) -> None:
    try:
        _create_with_words(path, owner, machine)
    except FileExistsError:
        _take_over(path, owner, machine)


def _create_with_words(path: Path, owner: Owner, machine: Machine) -> None:
    """Raises FileExistsError. The file has its words from the beginning: an empty one, as a kill or a power loss may
    leave it, names no owner that could be seen to be dead."""
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
    """Replace the file of a dead owner. One at a time: two that saw it dead must not both win."""
    _require_dead(path, machine)
    guard = path.with_suffix(".takeover")
    interrupted = parse_owner(read_text(guard))
    if interrupted is not None and interrupted.is_dead_on(machine):
        guard.unlink(missing_ok=True)  # of a takeover that was killed; should two do this, the id decides
    try:
        _create_with_words(guard, owner, machine)
    except FileExistsError:
        newcomer = _wait_for(lambda: None if guard.exists() else read_text(path), machine)
        words = str(parse_owner(newcomer) or "a process that is taking it over")
        raise _refusal(path, words, hint=_remove(guard)) from None
    try:
        dead = _require_dead(path, machine)  # once more: another may have taken it over before we had the guard
        let_members_save(path.parent, machine)
        guard.replace(path)
    except BaseException:
        guard.unlink(missing_ok=True)
        raise
    _tell_of_takeover(dead)


def _require_dead(path: Path, machine: Machine) -> Owner:
    owner = parse_owner(_wait_for(lambda: read_text(path) or None, machine))
    if owner is None or not owner.is_dead_on(machine):
        raise _refusal(path, str(owner or "an unknown owner"), hint=_remove(path))
    _refuse_living(path, machine)
    return owner


# --- Both -------------------------------------------------------------------------------------------------------------


def _refusal(path: Path, owner: str, *, hint: str = "") -> UserError:
    lines = ["wait for it, stop it, or give another --output-dir", hint]
    return UserError(
        "another process is writing to this run folder",
        where=str(path.parent),
        got=owner,
        hint="\n".join(line for line in lines if line),
    )


def _remove(path: Path) -> str:
    return f"if it runs no more, which cannot be seen from here: rm {path}"


def _tell_of_takeover(dead: Owner | str) -> None:
    # A warning: where no log is set up yet, Python prints it on standard error.
    _log.warning("note: the owner before, %s, ended without releasing this run folder; taking it over", dead)


def _write_owner(descriptor: int, owner: Owner) -> None:
    """Written before it is believed; on a full disk the lock itself still counts."""
    os.ftruncate(descriptor, 0)
    with suppress(OSError):
        os.write(descriptor, owner.to_json().encode())


def _id_in(path: Path) -> str:
    owner = parse_owner(read_text(path))
    return owner.id if owner else ""


def _wait_for(answer: Callable[[], str | None], machine: Machine) -> str | None:
    """What another process is about to write, or None if it does not come."""
    deadline = machine.now_s() + _WORDS_WAIT_S
    while not (found := answer()) and machine.now_s() < deadline:
        machine.sleep(_POLL_S)
    return found
