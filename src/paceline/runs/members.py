"""The processes that belong to an ownership: the owner and its ranks, each with a record in `.members`.

Every member knows the owner's id. Every few seconds it touches its record (a heartbeat) and checks that `run.lock`
still contains the id. If `run.lock` contains another id, the member stops writing and ends. A new owner first lets the
ranks of a dead owner save. Then it writes its id into the lock file, ends those ranks on this machine and waits for
those on other machines. Only then does it start its own ranks. File times are compared with each other, never with
this machine's clock.

A record can be copied with its folder, or written by another person. So a member keeps its record open for writing,
and the record names the folder. A process without this proof is not a member: it gets no signal, and its record is
removed.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.errors import OwnerLost, UserError
from paceline.runs.machine import THIS_MACHINE, Machine, read_text
from paceline.runs.owner import LOCK, OWNER_FILE, Owner, parse_owner, read_ids, this_process
from paceline.settings.small_files import open_plain

OWNER_ID = "PACELINE_OWNER_ID"  # set by the supervisor for the ranks it starts
MEMBERS = ".members"
BEAT_S = 2.0
SILENT_S = 30.0  # a process on another machine counts as dead after this time without a heartbeat
_SURELY_OLD_S = 600.0  # clocks of file servers and clients differ by less
_WATCH_S = 2.5 * BEAT_S
_SAVE_GRACE_S = 10.0  # for the last save of ranks whose owner died
_KILL_S = 10.0
_ELSEWHERE_S = 2 * SILENT_S
_POLL_S = 0.02


class Member:
    """This process as a member of a run."""

    def __init__(
        self,
        folder: Path,
        owner_id: str,
        on_lost: Callable[[OwnerLost], None] | None = None,
        machine: Machine = THIS_MACHINE,
        *,
        is_owner: bool = False,
    ) -> None:
        self.id = owner_id
        self._is_owner = is_owner
        self._close_record: Callable[[], object] = lambda: None
        self.on_lost = on_lost  # called by the heartbeat thread
        self._folder = folder
        self._machine = machine
        self._seen_in = ""  # the file that contained our id
        self._record = folder / MEMBERS / f"{machine.host}-{machine.pid}-{owner_id[:8]}.json"
        self._has_left = threading.Event()

    def join(self, *, beats: bool = True) -> None:
        """Call this before the process writes anything. Raises OwnerLost if the run has another owner."""
        self.require()
        with suppress(OSError):  # on a full disk the id in the lock file still keeps two owners apart
            self._write_record()
        if beats:
            threading.Thread(target=self._run, name="membership", daemon=True).start()

    def _write_record(self) -> None:
        require_real_members(self._folder)
        self._record.parent.mkdir(exist_ok=True)
        process = this_process(self._machine, self.id)
        record = replace(process, is_owner=self._is_owner or None, folder=_identify(self._folder))
        draft = self._record.with_suffix(".tmp")
        descriptor = open_plain(draft, os.O_WRONLY | os.O_TRUNC)
        # Keep the record open until this process leaves or ends. This proves that the record is about this process.
        self._close_record = weakref.finalize(self, os.close, descriptor)
        os.write(descriptor, record.to_json().encode())
        os.fsync(descriptor)  # after a power loss an empty record would name no process
        draft.replace(self._record)

    def require(self) -> None:
        """Raises OwnerLost if the folder has another owner; OSError if the lock file cannot be read now."""
        ids = read_ids(self._folder)
        for name, found in ids.items():
            if found == self.id:
                self._seen_in = name
                return
        # A deleted lock file names no other owner. An empty one was held by another owner meanwhile.
        is_gone = bool(self._seen_in) and (self._seen_in == OWNER_FILE or self._seen_in in ids)
        if is_gone or any(ids.values()):
            raise OwnerLost(
                "another process has taken over this run; this one writes nothing more and ends",
                where=str(self._folder),
                got=_name_owner(self._folder),
            )

    def beat(self) -> None:
        """Touch the record and check the lock file. Raises OwnerLost."""
        with suppress(OSError):
            self._machine.touch(self._record)
        with suppress(OSError):  # a read error is no evidence of another owner
            self.require()

    def leave(self) -> None:
        self._has_left.set()
        self._close_record()
        with suppress(OSError):
            self._record.unlink(missing_ok=True)
            self._record.parent.rmdir()  # fails while others are in it

    def _run(self) -> None:
        while not self._has_left.wait(BEAT_S):
            try:
                self.beat()
            except OwnerLost as lost:
                if self.on_lost is not None and not self._has_left.is_set():
                    self.on_lost(lost)
                return


def _name_owner(folder: Path) -> str:
    owners = [parse_owner(read_text(folder / name)) for name in (LOCK, OWNER_FILE)]
    return next((str(owner) for owner in owners if owner), "the lock file was emptied")


def read_members(folder: Path) -> dict[Path, Owner | None]:
    """The members by record file; None for a record that cannot be read."""
    return {path: parse_owner(read_text(path)) for path in _files(folder, "*.json")}


def require_real_members(folder: Path) -> None:
    """Refuse a link: records are written and removed here, and a link could lead to other files."""
    if _kind(folder / MEMBERS) not in (None, stat.S_IFDIR):
        raise UserError(
            "the records of a run's processes must be in a folder, and this is a link or a file",
            where=str(folder / MEMBERS),
            hint=f"if no process uses this run folder: rm {folder / MEMBERS}",
        )


def _files(folder: Path, pattern: str) -> list[Path]:
    """The regular files in the folder of records, if it is a real folder."""
    if _kind(folder / MEMBERS) != stat.S_IFDIR:
        return []
    return [path for path in sorted((folder / MEMBERS).glob(pattern)) if _kind(path) == stat.S_IFREG]


def _kind(path: Path) -> int | None:
    """The file type without following links; None if there is no file."""
    try:
        return stat.S_IFMT(path.lstat().st_mode)
    except OSError:
        return None


def _identify(folder: Path) -> str:
    found = folder.stat()
    return f"{found.st_dev}:{found.st_ino}"


def drop_dead_members(folder: Path, machine: Machine = THIS_MACHINE) -> None:
    """Remove the records of processes on this machine that were killed."""
    with suppress(OSError):  # the folder may be read-only by now; the next owner removes the records
        for path, member in read_members(folder).items():
            if member is not None and member.is_visible_on(machine) and member.is_dead_on(machine):
                path.unlink(missing_ok=True)
        (folder / MEMBERS).rmdir()


# --- A new owner ------------------------------------------------------------------------------------------------------


def is_written_elsewhere(folder: Path, machine: Machine) -> bool:
    """Whether a process on another machine has written here recently, or writes while we watch."""
    signs = [folder / "status.json", *_files(folder, "*.json")]
    times = {path: time for path in signs if (time := machine.changed_ns(path)) is not None}
    if not times:
        return False
    silent_s = (machine.file_clock_ns(folder) - max(times.values())) / 1e9
    if abs(silent_s) < SILENT_S:
        return True
    if silent_s > _SURELY_OLD_S:
        return False
    # Some file systems use the writer's clock for file times. Only a change proves that the process is alive.
    deadline = machine.now_s() + _WATCH_S
    while machine.now_s() < deadline:
        machine.sleep(_POLL_S)
        if any(machine.changed_ns(path) not in (None, time) for path, time in times.items()):
            return True
    return False


def living_owner(folder: Path, machine: Machine) -> Owner | None:
    """An owner that still runs on this machine. Its lock file may have been deleted."""
    living = _living_here(folder, machine)
    return next((member for member in living.values() if member.is_owner), None)


def let_members_save(folder: Path, machine: Machine) -> None:
    """Ranks of a dead owner stop at their next step, save and end. Wait for them before the lock file changes."""
    deadline = machine.now_s() + _SAVE_GRACE_S
    is_reported = False
    while machine.now_s() < deadline:
        living = _living_here(folder, machine)
        if not living:
            return
        if not is_reported:
            is_reported = True
            _print_note(f"note: waiting until {_count(len(living))} of the previous owner have saved")
        machine.sleep(_POLL_S)


def end_members(folder: Path, owner_id: str, machine: Machine) -> None:
    """End all processes of earlier owners. Call this when the lock file contains `owner_id`.

    Raises UserError if one cannot be ended.
    """
    _end_here(folder, owner_id, machine)
    _wait_for_other_machines(folder, owner_id, machine)
    with suppress(OSError):
        for draft in _files(folder, "*.tmp"):
            draft.unlink(missing_ok=True)
        (folder / MEMBERS).rmdir()


def _end_here(folder: Path, owner_id: str, machine: Machine) -> None:
    """End the ranks of a dead owner on this machine. A process that is not provably a member gets no signal."""
    deadline = machine.now_s() + _KILL_S
    while True:
        living = _living_here(folder, machine, owner_id)
        for path, member in _others(folder, machine, owner_id).items():
            if member is not None and member.is_visible_on(machine) and path not in living:
                path.unlink(missing_ok=True)
        if not living:
            return
        for path, member in living.items():
            # Without a start time this may be another process with the same number.
            if member.process_start is not None and _belongs_to(folder, path, member, machine):
                machine.kill(member.pid, member.process_start)
        if machine.now_s() > deadline:
            raise _refusal(folder, list(living.values()))
        machine.sleep(_POLL_S)


def _wait_for_other_machines(folder: Path, owner_id: str, machine: Machine) -> None:
    """A living rank sees the new id at its next heartbeat and removes its record. Remove the records of dead ranks."""
    started_s = machine.now_s()
    first_seen: dict[Path, tuple[int | None, float]] = {}
    is_reported = False
    while others := _others(folder, machine, owner_id):
        clock_ns = machine.file_clock_ns(folder)
        for path in others:
            time = machine.changed_ns(path)
            if path not in first_seen or first_seen[path][0] != time:
                first_seen[path] = (time, machine.now_s())
            watched_s = machine.now_s() - first_seen[path][1]
            is_old = time is None or (clock_ns - time) / 1e9 > SILENT_S
            if watched_s > (_WATCH_S if is_old else SILENT_S):
                path.unlink(missing_ok=True)
        if machine.now_s() - started_s > _ELSEWHERE_S:
            raise _refusal(folder, [member for member in others.values() if member])
        if not is_reported:
            is_reported = True
            hosts = ", ".join(sorted({member.host if member else "unknown" for member in others.values()}))
            _print_note(f"note: waiting for {_count(len(others))} of the previous owner, on {hosts}")
        machine.sleep(_POLL_S)


def _others(folder: Path, machine: Machine, owner_id: str = "") -> dict[Path, Owner | None]:
    """Members of other ownerships, without this process, which may have owned the folder before."""

    def is_other(member: Owner | None) -> bool:
        if member is None:
            return True
        is_me = member.is_visible_on(machine) and member.pid == machine.pid and not member.is_dead_on(machine)
        return member.id != owner_id and not is_me

    return {path: member for path, member in read_members(folder).items() if is_other(member)}


def _living_here(folder: Path, machine: Machine, owner_id: str = "") -> dict[Path, Owner]:
    """Other members on this machine that still run, or that may still run."""
    return {
        path: member
        for path, member in _others(folder, machine, owner_id).items()
        if member is not None
        and member.is_visible_on(machine)
        and not member.is_dead_on(machine)
        and _belongs_to(folder, path, member, machine) is not False
    }


def _belongs_to(folder: Path, record: Path, member: Owner, machine: Machine) -> bool | None:
    """Whether a living process is a member of this folder; None if the system cannot show it."""
    if member.folder is not None and member.folder != _identify(folder):
        return False  # the folder is a copy
    return machine.has_open(member.pid, record)


def _refusal(folder: Path, living: list[Owner]) -> UserError:
    return UserError(
        "processes of this run's previous owner are still running",
        where=str(folder),
        got="\n".join(str(member) for member in living) or "unknown",
        hint="end them, then start again",
    )


def _count(members: int) -> str:
    return "1 process" if members == 1 else f"{members} processes"


def _print_note(text: str) -> None:
    with suppress(OSError):  # a closed terminal
        os.write(2, f"{text}\n".encode())
