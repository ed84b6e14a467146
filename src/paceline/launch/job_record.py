"""job.json: the job that a run was submitted as. And how files of a job are written: for their owner alone."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path

from paceline.runs.json_files import JOB_RECORD, read_object

RECORD = "job.json"
SECRET_PREFIX = "secret:"  # of a variable's value: a reference to a Secret of Kubernetes
HIDDEN = "..."
# What may be handed to scancel and its siblings: a text that begins with a dash would be an option to them.
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclass(frozen=True)
class JobRecord:
    """job.json of a run folder: the job it was submitted as."""

    job_id: str
    cluster: str
    script: str
    command: list[str]  # what was typed
    array: str = ""
    scheduler: str = "slurm"  # or kubernetes, where job_id is the job's name and cluster a context of the kubeconfig
    namespace: str = ""  # of Kubernetes, as api
    api: str = ""  # job, jobset or trainjob
    submitted: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))
    earlier: list[str] = field(default_factory=list)  # ids of the jobs before, oldest first
    cancelled: str = ""  # when, by `paceline cancel`
    # How the job ended, as first seen from here: schedulers forget finished jobs.
    outcome: str = ""  # COMPLETED, FAILED or another final state of Slurm
    outcome_reason: str = ""
    outcome_code: str = ""

    def write(self, folder: Path) -> None:
        command = hide_values(self.command)
        write_private(folder / RECORD, json.dumps({**asdict(self), "command": command}, indent=2) + "\n")


def write_private(path: Path, text: str) -> None:
    """Replace a file that may contain secrets. Only its owner can read it, from its first byte on."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)  # has mode 0600
    temporary = Path(name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def hide_values(command: Sequence[str]) -> list[str]:
    """A command line without the values of its variables, which may be secrets. References stay."""
    shown: list[str] = []
    for word in command:
        flag = "--env=" if word.startswith("--env=") else ""
        name, is_set, value = word.removeprefix(flag).partition("=")
        is_variable = flag or (shown and shown[-1] == "--env")
        is_hidden = is_variable and is_set and not value.startswith(SECRET_PREFIX)
        shown.append(f"{flag}{name}={HIDDEN}" if is_hidden else word)
    return shown


def read_record(folder: Path) -> JobRecord | None:
    """Of the run, or of the array it is a task of. None for a run that no scheduler knows."""
    own = _parse_record(folder / RECORD)
    if own is not None:
        return own
    around = _parse_record(folder.absolute().parent / RECORD)
    task = folder.absolute().name.removeprefix("task-")
    if around is None or not around.array or not task.isdecimal():
        return None
    return JobRecord(**{**asdict(around), "job_id": f"{around.job_id}_{task}", "array": ""})


def _parse_record(path: Path) -> JobRecord | None:
    # The file may come from elsewhere: a value of another type would fail far from here.
    values = read_object(path, JOB_RECORD)
    if not _JOB_ID.fullmatch(values.get("job_id", "")):
        return None
    return JobRecord(**{field.name: values[field.name] for field in fields(JobRecord) if field.name in values})
