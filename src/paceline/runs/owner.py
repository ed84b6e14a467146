"""Which process owns a run folder, as `run.lock` names it. Ranks are named in the same way, in `.members`."""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from paceline.runs.machine import THIS_MACHINE, Machine
from paceline.settings.small_files import parse_json, read_small

_LARGEST_BYTES = 1_000_000
LOCK, OWNER_FILE = "run.lock", "run.owner"  # run.owner is used if the file system has no locks


@dataclass(frozen=True)
class Owner:
    """A process, with enough detail to distinguish it from a later process of the same number."""

    host: str
    pid: int
    since: str
    boot_id: str | None  # None if the system does not provide it
    process_start: str | None
    pid_namespace: str | None = None
    id: str = ""  # random; one per ownership, shared by the owner and its ranks
    # Only in records of `.members`:
    is_owner: bool | None = None
    folder: str | None = None  # identifies the run folder, so that a copy is recognised

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid} since {self.since}"

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @property
    def is_provably_dead(self) -> bool:
        return self.is_dead_on(THIS_MACHINE)

    @property
    def is_provably_alive(self) -> bool:
        return self.is_visible_on(THIS_MACHINE) and not self.is_provably_dead

    def is_visible_on(self, machine: Machine) -> bool:
        """Whether this machine can check if the process is alive."""
        pairs = ((self.boot_id, machine.boot_id), (self.pid_namespace, machine.pid_namespace))
        return self.host == machine.host and all(None in pair or pair[0] == pair[1] for pair in pairs)

    def is_dead_on(self, machine: Machine) -> bool:
        """False for processes of another host or container, which cannot be checked."""
        if self.host != machine.host:
            return False
        if self.boot_id is not None and machine.boot_id is not None and self.boot_id != machine.boot_id:
            return True
        if not self.is_visible_on(machine):
            return False
        if not machine.exists(self.pid):
            return True
        start = machine.process_start(self.pid)
        return self.process_start is not None and start is not None and start != self.process_start


def this_process(machine: Machine = THIS_MACHINE, owner_id: str = "") -> Owner:
    return Owner(
        host=machine.host,
        pid=machine.pid,
        since=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        boot_id=machine.boot_id,
        process_start=machine.process_start(machine.pid),
        pid_namespace=machine.pid_namespace,
        id=owner_id,
    )


def new_owner(machine: Machine = THIS_MACHINE) -> Owner:
    return this_process(machine, uuid.uuid4().hex)


def _process_number(value: object) -> int:
    number = int(str(value))
    if not 0 < number < 2**31:
        raise ValueError("no process has such a number")
    return number


def parse_owner(text: str | None) -> Owner | None:
    def text_of(name: str) -> str | None:
        return None if values.get(name) is None else str(values[name])

    try:
        values = dict(parse_json(text or ""))
        return Owner(
            host=str(values["host"]),
            pid=_process_number(values["pid"]),
            since=str(values["since"]),
            boot_id=text_of("boot_id"),
            process_start=text_of("process_start"),
            pid_namespace=text_of("pid_namespace"),
            id=text_of("id") or "",
            is_owner=values.get("is_owner") is True or None,
            folder=text_of("folder"),
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def read_ids(folder: Path) -> dict[str, str]:
    """The owner's id by file: run.lock and, without locks, run.owner. Empty if the file names no owner.

    Raises OSError if a file exists and cannot be read: then the owner is unknown.
    """
    found = {}
    for name in (LOCK, OWNER_FILE):
        try:
            owner = parse_owner(read_small(folder / name, _LARGEST_BYTES).decode(errors="replace"))
        except FileNotFoundError:
            continue
        except ValueError:  # too large for an owner's record
            owner = None
        found[name] = owner.id if owner else ""
    return found
