"""One owner per run folder, by a lock that dies with its process.

`run.lock` is flocked and says who holds it. A clean release empties the file; so a file with words in it and no lock
on it belongs to an owner that died, and is taken over with a note. Where the file system knows no flock, `run.owner`
stands in: created by whoever comes first, removed on release, and taken over only from an owner that is provably
dead. Wall-clock times are for people to read; nothing is decided by them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from paceline.errors import UserError

_log = logging.getLogger("paceline")
_NO_FLOCK_HERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_WORDS_WAIT_S = 0.5  # a winner writes its name within a moment of winning
_POLL_S = 0.01


@dataclass(frozen=True)
class Owner:
    """A process, told apart from a later one that happens to have its number."""

    host: str
    pid: int
    since: str
    boot_id: str | None  # where the system tells them
    process_start: str | None

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid} since {self.since}"

    @property
    def is_provably_dead(self) -> bool:
        """Of another host's processes nothing can be said."""
        if self.host != socket.gethostname():
            return False
        if self.boot_id is not None and _boot_id() is not None and self.boot_id != _boot_id():
            return True
        if not is_running(self.pid):
            return True
        start = _process_start(self.pid)
        return self.process_start is not None and start is not None and start != self.process_start

    @property
    def is_provably_alive(self) -> bool:
        return self.host == socket.gethostname() and not self.is_provably_dead


def this_process() -> Owner:
    return Owner(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        boot_id=_boot_id(),
        process_start=_process_start(os.getpid()),
    )


@contextmanager
def owned(lock: Path) -> Iterator[None]:
    """Hold a run folder by its lock file; a second owner is refused at once."""
    descriptor = _flocked(lock)
    if descriptor is None:
        with _owner_file(lock.with_suffix(".owner")):
            yield
        return
    try:
        dead = _read_text(lock)
        _write_owner(descriptor)
        if dead:
            _tell_of_takeover(_parse(dead) or dead)
        yield
    finally:
        with suppress(OSError):  # a folder that can no longer be written still loses its lock
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def refuse_if_owned(lock: Path) -> None:
    """An early answer that takes no lock: refuses if the owner is seen to be alive on this machine."""
    for path in (lock, lock.with_suffix(".owner")):
        owner = _parse(_read_text(path))
        if owner is not None and owner.pid != os.getpid() and owner.is_provably_alive:
            raise _refusal(path, str(owner))


# --- With flock -------------------------------------------------------------------------------------------------------


def _flocked(lock: Path) -> int | None:
    """A locked descriptor; None where the file system knows no such lock."""
    try:
        return _open_flocked(lock)
    except OSError as error:
        if error.errno in _NO_FLOCK_HERE:
            return None
        raise UserError(
            "the run folder cannot be written", where=str(lock), got=error.strerror, hint="--output-dir PATH"
        ) from error


def _open_flocked(lock: Path) -> int:
    """A descriptor that holds the lock of the file that has this name now. Raises UserError if somebody has it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(descriptor, lock):  # else somebody deleted it meanwhile, and another may lock a new one
                return descriptor
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise _refusal(lock, _who_has(lock)) from error
            raise
        os.close(descriptor)


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _who_has(path: Path) -> str:
    """The words of the living owner, who may have won so lately that those of a dead one still stand here."""

    def living() -> str | None:
        text = _read_text(path)
        owner = _parse(text)
        return None if not text or (owner is not None and owner.is_provably_dead) else str(owner or text)

    return _wait_for(living) or "an unknown owner"


# --- Without --------------------------------------------------------------------------------------------------------


@contextmanager
def _owner_file(path: Path) -> Iterator[None]:
    _log.info("note: this file system has no locks; %s says whose run folder this is", path)
    _create_owner_file(path)
    mine = _read_text(path)
    try:
        yield
    finally:
        if _read_text(path) == mine:
            path.unlink(missing_ok=True)


def _create_owner_file(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        _take_over(path)
        return
    _write_owner(descriptor)
    os.close(descriptor)


def _take_over(path: Path) -> None:
    """Replace the file of a dead owner. One at a time: two who saw it dead must not both think they won."""
    _require_dead(path)
    guard = path.with_suffix(".takeover")
    try:
        descriptor = os.open(guard, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        newcomer = _wait_for(lambda: None if guard.exists() else _read_text(path))
        raise _refusal(path, str(_parse(newcomer) or "a process that is taking it over"), removable=guard) from None
    try:
        dead = _require_dead(path)  # once more: somebody may have taken it over before we had the guard
        _write_owner(descriptor)
        guard.replace(path)
    except BaseException:
        guard.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    _tell_of_takeover(dead)


def _require_dead(path: Path) -> Owner:
    owner = _parse(_wait_for(lambda: _read_text(path) or None))
    if owner is None or not owner.is_provably_dead:
        raise _refusal(path, str(owner or "an unknown owner"), removable=path)
    return owner


# --- Both -------------------------------------------------------------------------------------------------------------


def _refusal(path: Path, owner: str, *, removable: Path | None = None) -> UserError:
    hint = "wait for it, stop it, or give another --output-dir"
    if removable is not None:
        hint += f"\nif it runs no more, which cannot be seen from here: rm {removable}"
    return UserError("another process is writing to this run folder", where=str(path.parent), got=owner, hint=hint)


def _tell_of_takeover(dead: Owner | str) -> None:
    _log.info("note: the owner before, %s, ended without releasing this run folder; taking it over", dead)


def _write_owner(descriptor: int) -> None:
    """Written before it is believed; on a full disk the lock itself still counts."""
    os.ftruncate(descriptor, 0)
    with suppress(OSError):
        os.write(descriptor, (json.dumps(asdict(this_process())) + "\n").encode())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _parse(text: str | None) -> Owner | None:
    try:
        values = json.loads(text or "")
        texts = {name: None if values[name] is None else str(values[name]) for name in ("boot_id", "process_start")}
        return Owner(host=str(values["host"]), pid=int(values["pid"]), since=str(values["since"]), **texts)
    except (ValueError, KeyError, TypeError):
        return None


def _wait_for(answer: Callable[[], str | None]) -> str | None:
    """What somebody else is about to write, or None if it does not come."""
    deadline = time.monotonic() + _WORDS_WAIT_S
    while not (found := answer()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return found


def is_running(pid: int) -> bool:
    """Whether a process of this host with this number runs."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return _stat_fields(pid)[:1] != ["Z"]  # a zombie holds nothing and writes nothing


def _process_start(pid: int) -> str | None:
    """In clock ticks since the machine started: with the number, a process's name for ever."""
    fields = _stat_fields(pid)
    return fields[19] if len(fields) > 19 else None


def _stat_fields(pid: int) -> list[str]:
    """Of /proc/PID/stat from the state on; the name before it may hold anything."""
    return _read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _boot_id() -> str | None:
    return _read_text(Path("/proc/sys/kernel/random/boot_id")) or None
