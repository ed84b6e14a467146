"""All runs below a folder, from the plain files they keep. There is no index: the files are the catalog.

Only small files are read, so that a thousand runs are listed quickly, also over a network. For owners on this machine,
the process table shows whether they run. Schedulers are queried only by `paceline status`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.errors import UserError, printable_line
from paceline.runs.folder import MIRROR_NOTE, RUNS, RunFolder, require_run_folder
from paceline.runs.json_files import (
    ENVIRONMENT,
    JOB_IDS,
    JOB_RECORD,
    MIRROR,
    ROW,
    STATUS,
    fit,
    read_bounded,
    read_object,
)
from paceline.runs.machine import read_text
from paceline.runs.notes import NOTES, Notes, read_notes
from paceline.runs.owner import LOCK, OWNER_FILE, Owner, parse_owner
from paceline.settings.small_files import parse_json

JOB = "job.json"
_SCRIPT = "job.sbatch"
_LARGEST_SCRIPT_BYTES = 1_000_000
_LARGEST_TABLE_BYTES = 100_000_000
_LOCKS = (LOCK, OWNER_FILE)
_Living = Literal["running", "starting", "silent", "submitted"]  # running, or possibly running: these are not changed
_Ended = Literal["finished", "preempted", "stopped", "cancelled", "failed", "lost", "unknown"]
State = Literal[_Living, _Ended]
LIVING: tuple[State, ...] = get_args(_Living)
STATES: tuple[State, ...] = get_args(State)
_DEEPEST = 3  # runs/project/sweep/run; use --in for deeper ones
_DEEPEST_IN_STORE = 32  # runs/s3/bucket/a/b/run: a working copy has the path of its store
_PROTOCOLS = {  # those of fsspec, which is slow to import
    *("abfs", "abfss", "adl", "az", "dbfs", "file", "ftp", "gcs", "gs", "hdfs", "hf", "http", "https", "local"),
    *("memory", "oci", "oss", "s3", "s3a", "sftp", "smb", "ssh", "wasb", "webhdfs"),
}
_SILENT_S = 1800.0  # limit without an update, for an owner that cannot be checked from here
_STAMP = re.compile(r"(-rehearsal)?-\d{8}-\d{6}(-\d+)?$")
_TAIL_BYTES = 1 << 16
_RESTARTED = '"done": "started again'
_MOST_NAMED = 6


@dataclass(frozen=True)
class RunEntry:
    """One run as a table shows it. None: not known (yet)."""

    name: str  # the path below the catalog's root
    path: Path
    recipe: str
    state: str  # one of STATES
    step: int | None
    last_step: int | None
    best_accuracy: float | None  # of validation
    test_accuracy: float | None
    test_metric: str  # of a multi-label run or a regression that has finished
    test_value: float | None
    images_per_s: float | None
    eta_s: float | None
    restarts: int
    updated: float  # seconds since 1970
    owner: str
    mirror: str
    notes: Notes = field(default_factory=Notes)

    @property
    def progress(self) -> float | None:
        if self.state == "finished":
            return 1.0
        if self.step is None or not self.last_step:
            return None
        return self.step / self.last_step

    @property
    def accuracy(self) -> float | None:
        """Test accuracy if it is known, otherwise validation accuracy."""
        return self.test_accuracy if self.test_accuracy is not None else self.best_accuracy

    def to_json(self) -> dict[str, Any]:
        content = {**asdict(self), "path": str(self.path), "progress": self.progress}
        del content["notes"]
        content |= {"tags": list(self.notes.tags), "note": self.notes.note}
        content["updated"] = datetime.fromtimestamp(self.updated).astimezone().isoformat(timespec="seconds")
        return content


def list_runs(root: Path) -> list[RunEntry]:
    """Every run below a folder, newest first."""
    now = datetime.now().timestamp()
    entries = [_read_entry(path, str(path.relative_to(root)), files, now) for path, files in _find(root, _DEEPEST)]
    return sorted(entries, key=lambda entry: entry.updated, reverse=True)


def read_entry(path: Path) -> RunEntry:
    """One run, with the name as given."""
    return _read_entry(path, str(path), {entry.name for entry in os.scandir(path)}, datetime.now().timestamp())


def _find(folder: Path, depth: int) -> Iterator[tuple[Path, set[str]]]:
    """Run folders and their file names. A run contains no runs, but a job array contains its tasks."""
    try:
        with os.scandir(folder) as found:
            entries = list(found)
    except OSError:  # removed meanwhile, or not readable
        return
    names = {entry.name for entry in entries}
    if is_run(names):
        yield folder, names
        return
    if depth > 0:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False) and (depth > _DEEPEST or not entry.name.startswith(".")):
                is_store = depth == _DEEPEST and entry.name in _PROTOCOLS
                yield from _find(folder / entry.name, _DEEPEST_IN_STORE if is_store else depth - 1)


def is_run(names: set[str]) -> bool:
    """Whether the file names are those of a run that was started, or of a submitted job."""
    has_begun = "config.yaml" in names and not names.isdisjoint(("status.json", "metrics.jsonl"))
    has_failed_early = {"status.json", LOCK} <= names  # before its config was written
    is_job = JOB in names and not any(name.startswith("task-") for name in names)
    return has_begun or has_failed_early or is_job


def _read_entry(path: Path, name: str, files: set[str], now: float) -> RunEntry:
    status = read_object(path / "status.json", STATUS) if "status.json" in files else {}
    updated = _time_of(status.get("updated")) or _time_of_folder(path)
    is_open = status.get("status") == "running" or not status
    owner = read_owner(path) if is_open else None
    is_left = is_open and LOCK in files and _is_left(path)
    epochs = _read_epochs(path / "metrics.csv") if "metrics.csv" in files else _Epochs()
    restarts = _count(path / "failures.jsonl", _RESTARTED) if "failures.jsonl" in files else 0
    restarts += _count(path / "requeues.jsonl", "\n") if "requeues.jsonl" in files else 0
    return RunEntry(
        name=name,
        path=path,
        recipe=recipe_of(path),
        state=_state(status, owner, is_left=is_left, silent_s=now - updated)
        or _state_of_job(path, is_job=JOB in files),
        step=_whole(status.get("step")),
        last_step=_whole(status.get("last_step")),
        best_accuracy=epochs.best_accuracy,
        test_accuracy=_number(status.get("test_accuracy")),
        test_metric=printable_line(status.get("test_metric", "")),
        test_value=_number(status.get("test_value")),
        images_per_s=epochs.images_per_s,
        eta_s=_number(status.get("eta_s")),
        restarts=restarts,
        updated=updated,
        owner=printable_line(str(owner or "")),
        mirror=printable_line(read_object(path / MIRROR_NOTE, MIRROR).get("url", "")) if MIRROR_NOTE in files else "",
        notes=read_notes(path) if NOTES in files else Notes(),
    )


def _state(status: dict[str, Any], owner: Owner | None, *, is_left: bool, silent_s: float) -> str:
    """The state of a run; empty if the run has written nothing yet."""
    written = str(status.get("status", ""))
    if written and written != "running":
        return written if written in STATES else "unknown"
    if owner is not None and owner.is_provably_dead:
        return "lost"
    if written and is_left:
        return "lost"
    if not written:
        return "starting" if owner is not None else ""
    is_seen = owner is not None and owner.is_provably_alive
    return "running" if is_seen or silent_s < _SILENT_S else "silent"


def _state_of_job(path: Path, is_job: bool) -> str:
    """The state of a run that has written nothing here, as recorded by `paceline cancel` and `paceline status`."""
    if not is_job:
        return "unknown"
    record = read_object(path / JOB, JOB_RECORD)
    outcome = record.get("outcome", "")
    if record.get("cancelled") or outcome == "CANCELLED":
        return "cancelled"
    if outcome == "COMPLETED":  # the folder of a Kubernetes run may be visible only in the cluster
        return "finished" if record.get("scheduler") == "kubernetes" else "lost"
    return "failed" if outcome else "submitted"


def read_owner(folder: Path) -> Owner | None:
    """The owner of the folder, also a dead one. A clean release empties the file."""
    for name in _LOCKS:
        owner = parse_owner(read_text(folder / name))
        if owner is not None:
            return owner
    return None


def _is_left(folder: Path) -> bool:
    """Whether an owner released the folder without writing a final status."""
    lock, owner = (folder / name for name in _LOCKS)
    try:
        return lock.stat().st_size == 0 and not owner.exists()
    except OSError:
        return False


def recipe_of(path: Path) -> str:
    """The recorded recipe; for older runs the folder's name without its time."""
    recipe = read_object(path / "environment.json", ENVIRONMENT).get("recipe")
    return printable_line(recipe or _STAMP.sub("", path.absolute().name))


def find_by_job(root: Path, job: str) -> Path | None:
    """The folder of the run that was submitted as this job: its id, an earlier one, or the job's name."""
    for path, files in _find(root, _DEEPEST):
        if JOB not in files:
            continue
        record = read_object(path / JOB, JOB_IDS)
        if job in (record.get("job_id"), *record.get("earlier", ())):
            return path
        if _SCRIPT in files and job == _job_name(path / _SCRIPT):
            return path
    return None


def _job_name(script: Path) -> str | None:
    """Read only the script in the run folder: job.json is not trusted and may name any file."""
    try:
        text = read_bounded(script, _LARGEST_SCRIPT_BYTES).decode()
    except (OSError, ValueError):
        return None
    named = re.search(r"^#SBATCH --job-name=['\"]?([^\s'\"]+)", text, re.MULTILINE)
    return named[1] if named else None


# --- Small files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Epochs:
    best_accuracy: float | None = None
    images_per_s: float | None = None


def _read_epochs(path: Path) -> _Epochs:
    """Read metrics.csv, which has two lines per epoch; metrics.jsonl may be a hundred times longer."""
    best = speed = None
    try:
        lines = read_bounded(path, _LARGEST_TABLE_BYTES).decode().splitlines()[1:]
    except (OSError, ValueError):
        return _Epochs()
    for line in lines:
        cells = line.split(",")
        if len(cells) != 5:
            continue
        try:
            if cells[1] == "val":
                best = max(best or 0.0, float(cells[3]))
            elif cells[1] == "train":
                speed = float(cells[4])
        except ValueError:
            continue
    return _Epochs(best, speed)


def read_last_step(path: Path) -> dict[str, Any]:
    """The last complete step row of metrics.jsonl, read from its end."""
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        if line.startswith(b'{"kind": "step"'):
            with suppress(ValueError):  # incomplete after a crash: use the previous row
                row: dict[str, Any] = fit(parse_json(line), ROW)
                return row
    return {}


def _count(path: Path, what: str) -> int:
    try:
        return read_bounded(path, _LARGEST_TABLE_BYTES).decode(errors="replace").count(what)
    except (OSError, ValueError):
        return 0


def _whole(value: object) -> int | None:
    """A step count; None if it does not fit into a double."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and abs(value) < 2**53 else None  # type: ignore[arg-type, return-value]


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None  # not infinite, not NaN, not too large for a double


def _time_of(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _time_of_folder(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


# Find a run by path, name, beginning of a name, or job.


def find_run(name: str) -> RunFolder:
    """A path, the name of a folder in runs/ or the beginning of only one, or the job it was submitted as."""
    path = locate_run(name)
    if not (path / JOB).is_file() and not (path / "status.json").is_file():
        require_run_folder(path)
    return RunFolder(path)


def locate_run(name: str) -> Path:
    """Like `find_run`, but returns a path that may not be a run. An existing folder is returned unchanged."""
    path = next((path for path in (Path(name), RUNS / name) if path.is_dir()), None)
    # Try job ids first: a job's number may also be the beginning of several run names.
    return path or find_by_job(RUNS, name) or _by_beginning(name) or Path(name)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def _by_beginning(name: str) -> Path | None:
    if not name or "/" in name or not RUNS.is_dir():
        return None
    found = sorted(path for path in RUNS.iterdir() if path.name.startswith(name) and path.is_dir())
    if len(found) > 1:
        names = [path.name for path in found]
        raise UserError(
            f"{len(names)} runs begin with {name!r}",
            where=str(RUNS),
            got=", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else ""),
            hint=f"{max(found, key=_changed_at).name} is the newest; or more of the name, or a path",
        )
    return found[0] if found else None
