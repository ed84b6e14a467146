"""The run folder: plain files with one owner, readable by any tool.

    config.yaml  environment.json  status.json  run.lock  metrics.jsonl  metrics.csv  results.json
    report.html  examples.json  data.json  steps.f64  checkpoints.jsonl  receipt.json
    tensorboard/  profile/  logs/rank-*.log  checkpoints/{step-*,latest,best}  mirror.json (a run in an object store)
    after a failure: failure.json  failures.jsonl  stacks/rank-*.txt  bad-batches/  faults.jsonl

Small files are replaced by rename, so that a reader never sees a partial file.
"""

from __future__ import annotations

import difflib
import errno
import json
import logging
import os
import re
import shlex
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, OwnerLost, UserError
from paceline.runs import lock
from paceline.runs.drafts import draft_of, remove_drafts, write_draft
from paceline.runs.json_files import ENVIRONMENT, STATUS, read_object
from paceline.runs.linked_checkpoints import claim_linked_checkpoints, refuse_checkpoints_of_another_run
from paceline.runs.machine import THIS_MACHINE, Machine
from paceline.runs.members import Member
from paceline.runs.owner import LOCK, OWNER_FILE
from paceline.runs.patience import names_in, read_patiently
from paceline.settings.small_files import not_plain, open_plain

_log = logging.getLogger("paceline")
RUNS = Path("runs")
ATTEMPT_MARK = "attempt"  # the first line of an attempt's log: this word and its number
MIRROR_NOTE = "mirror.json"
TEMPORARY = "PACELINE_TEMPORARY_FOLDER"  # 1: removed at the end of a task; messages do not refer to it
CHECKPOINT_MARK = "manifest.json"  # a step folder with this file is a checkpoint
_NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
_STACKS = re.compile(r"attempt-[0-9]+-rank-[0-9]+\.txt")
_WRITTEN_FILES = (  # a run replaces these
    *("data.json", "results.json", "environment.json", "report.html", "examples.json", "metrics.csv", "status.json"),
    *("checkpoints.jsonl", "receipt.json", "steps.f64"),
    *("failure.json", "failures.jsonl", "faults.jsonl", "requeues.jsonl"),
)
_REPLACED_IN_FOLDERS = {  # files that a run replaces or removes, by folder
    "tensorboard": re.compile(r".*", re.DOTALL),
    ".mirror": re.compile(r".*", re.DOTALL),
    "profile": re.compile(r"top\.txt|rank-[0-9]+\.json\.gz"),
    "logs": re.compile(r"rank-[0-9]+\.log"),
    "stacks": _STACKS,
    "bad-batches": re.compile(r"step-.*", re.DOTALL),
    "checkpoints": re.compile(r"latest|best"),
}
_STEP_FOLDER = re.compile(r"((damaged|replaced)-)?step-[0-9]+")


def write_atomically(path: Path, text: str, *, is_durable: bool = True) -> None:
    """Replace a small file by rename.

    Durable: after a power loss the file has the old text or the new text. A flush may take as long as a step. Files
    that are replaced during training and can be recreated are therefore not durable.
    """
    temporary = draft_of(path)
    try:
        write_draft(temporary, text.encode("utf-8", errors="backslashreplace"))  # names that are not UTF-8
        if is_durable:
            flush(temporary)
        temporary.replace(path)
        if is_durable:
            flush(path.parent)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: dict[str, Any], *, is_durable: bool = True) -> None:
    write_atomically(path, json.dumps(content, indent=2) + "\n", is_durable=is_durable)


def flush(path: Path) -> None:
    """Write a file's contents, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync for folders.
        if error.errno not in _NO_FSYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def unwritable_folder(path: Path, error: OSError) -> UserError:
    what, hint = "the run folder cannot be created", "--output-dir PATH"
    return UserError(what, where=str(path), got=error.strerror, hint=hint)


def is_lost(folder: Path, error: OSError) -> bool:
    """Whether the folder is removed or read-only, so that no later write can succeed."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return not folder.is_dir()
    return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)


def lost_folder(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        "the run folder cannot be written any more",
        where=str(path),
        got=error.strerror,
        hint="if it is still there, make it writable, then --resume auto",
    )


class RankLog(logging.Handler):
    """A rank's log file. If it cannot be written, lines are dropped with a single warning."""

    def __init__(self, path: Path) -> None:
        # Open the file first: if that fails, the handler must not be registered with logging.
        self._file = open(open_plain(path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)  # noqa: PTH123, SIM115
        self._path = path
        self._is_reported = False
        super().__init__()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.write((self.format(record) + "\n").encode(errors="replace"))
        except OSError as error:
            if not self._is_reported:
                self._is_reported = True
                # Unbuffered: most ranks print to this file, and a buffer would fail again at exit.
                with suppress(OSError):
                    os.write(1, f"warning: {self._path.name} cannot be written: {error.strerror}\n".encode())

    def close(self) -> None:
        self._file.close()
        super().close()


class RunFolder:
    """Paths and small files of one run. Members write only while their owner holds the folder."""

    def __init__(self, path: Path, member: Member | None = None) -> None:
        self.path = path
        self.member = member
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.data = path / "data.json"
        self.status = path / "status.json"
        self.lock = path / LOCK
        self.metrics_jsonl = path / "metrics.jsonl"
        self.metrics_csv = path / "metrics.csv"
        self.steps = path / "steps.f64"
        self.results = path / "results.json"
        self.ledger = path / "checkpoints.jsonl"
        self.receipt = path / "receipt.json"
        self.examples = path / "examples.json"
        self.report = path / "report.html"
        self.tensorboard = path / "tensorboard"
        self.profile = path / "profile"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.stacks = path / "stacks"
        self.failure = path / "failure.json"
        self.failures = path / "failures.jsonl"
        self.faults = path / "faults.jsonl"
        self.audits = path / "audit.jsonl"
        self.exclude = path / "exclude.txt"
        self.requeues = path / "requeues.jsonl"
        self.bad_batches = path / "bad-batches"
        self._unwritable: set[str] = set()

    @property
    def is_temporary(self) -> bool:
        return os.environ.get(TEMPORARY, "") == "1"

    @property
    def resume_command(self) -> str | None:
        """The command that resumes this run with its own settings. None for a temporary folder."""
        return None if self.is_temporary else f"paceline train {shlex.quote(str(self.config))} --resume auto"

    def create(self) -> None:
        try:
            new = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            for folder in (self.path, self.logs, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            # A checkpoint is durable only if all its parent folders are. Flush existing ones, too: a start that was
            # killed may have created them without a flush.
            for folder in dict.fromkeys((self.path, self.path.parent, *(path.parent for path in new))):
                flush(folder)
        except OSError as error:
            raise unwritable_folder(self.path, error) from error

    @property
    def holds_a_run(self) -> bool:
        return self.config.exists() or self.metrics_jsonl.exists() or has_checkpoint(self.path)

    @property
    def files_of_others(self) -> list[str]:
        """Files that a run would overwrite or remove, in a folder in which no run was ever started."""
        names = set(names_in(self.path))
        found = sorted({self.config.name, self.metrics_jsonl.name, *_WRITTEN_FILES} & names)
        for name, replaced in _REPLACED_IN_FOLDERS.items():
            inside = sorted(names_in(self.path / name)) if name in names else []
            found += [f"{name}/{inner}" for inner in inside if replaced.fullmatch(inner)]
        # Another program may use the same names. A missing lock file proves nothing: the user may have deleted it.
        is_run = LOCK in names or "paceline" in read_object(self.environment, ENVIRONMENT) or has_checkpoint(self.path)
        return [] if is_run else found

    def log_of(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def stacks_of(self, attempt: int, rank: int) -> Path:
        return self.stacks / f"attempt-{attempt}-rank-{rank}.txt"

    def drop_empty_stacks(self) -> None:
        """Every rank opens a file for stack traces. Remove the empty ones."""
        with suppress(OSError):  # not empty, not there, or in a folder that has turned read-only
            for path in self.stacks.glob("*.txt"):
                if _STACKS.fullmatch(path.name) and path.stat().st_size == 0:
                    path.unlink()
            self.stacks.rmdir()

    def write_status(self, state: str, **details: Any) -> None:
        """state: running, preempted (by a signal), stopped (by Ctrl-C), finished or failed. Raises OwnerLost."""
        self._require_owner_if_known()
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        if state != "running" and "last_step" not in details:  # keep the progress for listings
            kept = self.read_status().get("last_step")
            details |= {"last_step": kept} if kept is not None else {}
        content = {
            "status": state,
            **details,
            **self._mirror_line(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "updated": now,
        }
        try:
            write_json(self.status, content, is_durable=state != "running")
        except OSError as error:
            if state != "failed":  # the failure is already on the screen
                self.warn_on_write_error(self.status.name, error)
        else:
            self.warn_on_write_error(self.status.name, None)

    def warn_on_write_error(self, what: str, error: OSError | None) -> None:
        """Warn once if a file for people cannot be written, and continue training. None: the write succeeded.

        Space on a full disk may become free again. If the folder itself is lost, raise: nothing can be saved any more.
        """
        if error is None:
            if what in self._unwritable:
                self._unwritable.remove(what)
                _log.info("note: %s can be written again", what)
            return
        if is_lost(self.path, error):
            raise lost_folder(self.path, error) from error
        if what not in self._unwritable:
            self._unwritable.add(what)
            _log.warning("warning: %s cannot be written: %s; training continues without it", what, error.strerror)

    def read_status(self) -> dict[str, Any]:
        return read_object(self.status, STATUS)

    def keeps_final_status(self, before: dict[str, Any]) -> bool:
        """Whether the run had ended before this start and was not continued. Its status is then kept."""
        return before.get("status") in ("finished", "preempted", "stopped") and self.read_status() == before

    def update_mirror_status(self) -> None:
        """Update the mirror's progress in status.json after the last status was written."""
        self._require_owner_if_known()
        status = self.read_status()
        if status:
            write_json(self.status, {**status, **self._mirror_line()})

    def _mirror_line(self) -> dict[str, Any]:
        """The mirror's progress. The process that mirrors writes it; it may be another process."""
        from paceline.runs.stores import read_own_note  # a circular import at module level

        note = read_own_note(self.path)
        return {"mirror": note.says} if note is not None and note.says else {}

    @contextmanager
    def owned(
        self, on_lost: Callable[[OwnerLost], None] | None = None, machine: Machine = THIS_MACHINE
    ) -> Iterator[Member]:
        """Lock the folder; a second owner is refused. The lock is released when the process ends.

        on_lost: called in another thread if another host takes over the folder.
        """
        before = self.member
        self._require_plain()
        refuse_checkpoints_of_another_run(self.path)
        with lock.owned(self.lock, machine) as owner_id:
            claim_linked_checkpoints(self.path)
            remove_drafts(self.path)
            self.member = member = Member(self.path, owner_id, on_lost, machine, is_owner=True)
            try:
                member.join()
                yield member
            finally:
                member.leave()
                self.member = before

    def _require_plain(self) -> None:
        """Files that a run changes in place must be regular files in its own folders, not links."""
        folders = (self.logs, self.stacks, self.profile, self.tensorboard, self.bad_batches, self.path / ".mirror")
        of_owner = (self.lock, self.path / OWNER_FILE)
        in_place = (*of_owner, self.metrics_jsonl, self.steps, self.failures, self.faults, self.requeues)
        for path in folders:
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise not_plain(path)
        inside = [path for folder in folders[:3] if folder.is_dir() for path in folder.iterdir()]
        for path in (*in_place, *(path for path in inside if path.is_symlink() or not path.is_dir())):
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise not_plain(path)
        for path in (self.config, *(self.path / name for name in _WRITTEN_FILES)):  # replaced by rename
            if path.is_dir() and not path.is_symlink():
                raise not_plain(path)

    def require_owner(self) -> None:
        """Called before a durable change. Raises OwnerLost; OSError if the lock file cannot be read."""
        if self.member is not None:
            self.member.require()

    def _require_owner_if_known(self) -> None:
        with suppress(OSError):  # the following write reports the disk error
            self.require_owner()

    def refuse_if_owned(self) -> None:
        """An early check before anything is started. Only `owned` is reliable."""
        self._require_plain()
        refuse_checkpoints_of_another_run(self.path)
        lock.refuse_if_owned(self.lock)


def has_checkpoint(path: Path) -> bool:
    """Whether this is a checkpoint, or a run folder or checkpoints folder that holds one, also a damaged one.

    A folder that cannot be read is an error. If it counted as empty, a run would start at step 0.
    """

    def look() -> bool:
        names = names_in(path)
        return CHECKPOINT_MARK in names or any(map(_STEP_FOLDER.fullmatch, [*names, *names_in(path / "checkpoints")]))

    return read_patiently("looking for checkpoints", path, look)


_STAMP = re.compile(r"-\d{8}-\d{6}(-\d+)?$")


def require_run_folder(path: Path) -> None:
    if not (path / "config.yaml").is_file():
        raise UserError("this is not a run folder", where=str(path), hint=_nearest_run(path))


def _nearest_run(path: Path) -> str:
    names = sorted((entry.name for entry in RUNS.iterdir() if entry.is_dir()), reverse=True) if RUNS.is_dir() else []
    # Time stamps make all names similar, so compare names without them too. The newest of a recipe comes first.
    plain = {_STAMP.sub("", name): name for name in reversed(names)}
    close = [] if path.exists() else difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    close += [] if path.exists() else difflib.get_close_matches(path.name, plain, n=1, cutoff=0.75)
    return (
        f"perhaps you meant {RUNS / plain.get(close[0], close[0])}"
        if close
        else "a folder that paceline train wrote; paceline runs lists them"
    )
