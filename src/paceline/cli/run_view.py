"""A run seen from outside: its files, its process, and its job in a cluster. For status, watch, cancel and logs.

Reading changes only job.json: it keeps how a job ended, because its scheduler forgets finished jobs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Annotated, Any

from paceline.checkpoints.format import DamagedCheckpoint, step_folders, step_of
from paceline.checkpoints.store import inspect_checkpoint
from paceline.errors import PacelineError, printable_line
from paceline.integrations.slurm.client import JobState, explain_reason, read_state
from paceline.launch.job_record import RECORD, JobRecord, read_record
from paceline.metrics.screen import in_words_s
from paceline.runs.catalog import RunEntry, read_entry, read_last_step, read_owner
from paceline.runs.folder import RunFolder
from paceline.runs.json_files import FAILURE, read_object
from paceline.runs.owner import Owner
from paceline.runs.patience import UnreadableNow
from paceline.runs.stores import read_own_note
from paceline.settings.declare import Arg

# A word that names a run.
RunName = Annotated[str, Arg(place="word", completes="run")]
_OVER = ("finished", "failed", "preempted", "stopped", "cancelled", "lost", "ended")
_FAILED_JOBS = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")


@dataclass(frozen=True)
class RunView:
    """A run as it looks from outside."""

    folder: RunFolder
    status: dict[str, Any]  # status.json
    record: JobRecord | None
    job: JobState | None  # None: it has none, or the cluster does not answer
    trouble: str  # why not
    owner: Owner | None
    failure: dict[str, Any]  # failure.json
    saved_step: int
    entry: RunEntry
    now: dict[str, Any]  # the newest row of its steps
    last_line: str = ""  # of the log, if only the cluster can read the run folder

    @property
    def is_far(self) -> bool:
        """Its folder is in the cluster: nothing of the run but its job can be seen from here."""
        return self.is_kubernetes and not self.status

    @property
    def is_kubernetes(self) -> bool:
        return self.record is not None and self.record.scheduler == "kubernetes"

    @property
    def state(self) -> str:
        """queued, starting, running, stopping, finished, failed, preempted, stopped, cancelled, lost, or unknown.

        An array has ended, and so has a Kubernetes job that is gone before anything here saw how.
        """
        if self.record is not None and self.record.array:
            return self._state_of_array()
        written = str(self.status.get("status", ""))
        if written == "finished":
            return written
        if self.is_kubernetes and self.job is not None and self.job.state == "COMPLETING":
            return "stopping"
        if self.job is not None and self.job.is_active:
            waits = self.job.state != "RUNNING" and not self.job.running_for
            return "queued" if waits else "running" if written == "running" or self.is_far else "starting"
        if written in ("failed", "preempted", "stopped"):
            return written
        if self.trouble:
            return written or "unknown"
        if self.is_far and self.job is not None and self.job.state == "COMPLETED":
            return "finished"
        if self.record is not None and self.record.cancelled:
            return "cancelled"
        if self.job is not None and self.job.state in ("CANCELLED", *_FAILED_JOBS):
            return "cancelled" if self.job.state == "CANCELLED" else "failed"
        if self.job is not None:
            return "ended" if self.is_far else "lost"
        if self.entry.state == "lost":
            return "lost"
        return written or ("starting" if self.owner is not None else "unknown")

    def _state_of_array(self) -> str:
        if self.job is None:
            return "unknown"
        if self.job.is_active:
            return "queued" if self.job.state == "PENDING" else "running"
        return "ended"

    @property
    def is_over(self) -> bool:
        return self.state in _OVER


def look(folder: RunFolder) -> RunView:
    record = read_record(folder.path)
    job, trouble = None, ""
    if record is not None:
        try:
            job = read_job(record)
            record, job = _remember_outcome(folder, record, job)
        except PacelineError as error:
            trouble = error.what + (f" ({str(error.got).partition(chr(10))[0]})" if error.got else "")
    status = folder.read_status()
    return RunView(
        folder=folder,
        status=status,
        record=record,
        job=job,
        trouble=trouble,
        owner=read_owner(folder.path),
        failure=read_object(folder.failure, FAILURE),
        saved_step=_newest_saved_step(folder),
        entry=read_entry(folder.path),
        now=read_last_step(folder.metrics_jsonl),
        last_line=_last_line(record) if record is not None and not status and job is not None and job.state else "",
    )


def _last_line(record: JobRecord) -> str:
    """Of the log, for a run on Kubernetes whose files are not seen from here."""
    if record.scheduler != "kubernetes":
        return ""
    from paceline.integrations.kubernetes.logs import read_last_line

    return read_last_line(record)


def read_job(record: JobRecord) -> JobState:
    """What the scheduler that has the job says of it."""
    if record.scheduler == "kubernetes":
        from paceline.integrations.kubernetes.client import read_kubernetes_state  # late: `status` must be fast

        return read_kubernetes_state(record)
    return read_state(record.job_id, record.cluster)


def _remember_outcome(folder: RunFolder, record: JobRecord, job: JobState) -> tuple[JobRecord, JobState]:
    """Keep how a job has ended: its scheduler forgets it, and `paceline runs` reads only files."""
    has_ended = bool(job.state) and not job.is_active and not job.tasks
    if record.scheduler == "kubernetes":
        has_ended = job.state in ("COMPLETED", "FAILED")
    if has_ended and not record.outcome:
        record = replace(record, outcome=job.state, outcome_reason=job.reason, outcome_code=job.exit_code)
        _keep_own(record, folder)
    elif job.is_active and record.outcome and record.scheduler == "slurm":
        record = replace(record, outcome="", outcome_reason="", outcome_code="")  # an administrator has requeued it
        _keep_own(record, folder)
    elif not job.state and record.outcome:
        job = replace(job, state=record.outcome, reason=record.outcome_reason, exit_code=record.outcome_code)
    return record, job


def _keep_own(record: JobRecord, folder: RunFolder) -> None:
    """A task of an array has no record of its own."""
    if (folder.path / RECORD).exists():
        with suppress(OSError):  # a folder of another user
            record.write(folder.path)


def note_cancel(view: RunView) -> None:
    """In the run's record: a scheduler forgets a job that was cancelled before it started."""
    assert view.record is not None
    _keep_own(replace(view.record, cancelled=datetime.now().astimezone().isoformat(timespec="seconds")), view.folder)


def describe(view: RunView) -> str:
    lines = [f"{printable_line(str(view.folder.path))}: {view.state}{_progress(view)}"]
    rows = [
        ("job", _job_line(view)),
        ("now", _now_line(view)),
        ("best", _best_line(view)),
        ("saved", f"step {view.saved_step}" if view.saved_step else ""),
        ("mirror", _mirror_line(view)),
        ("updated", _updated(view)),
        ("reason", _reason(view)),
        ("failure", _failure_line(view)),
        ("said", view.last_line),
        ("tags", " ".join(view.entry.notes.tags)),
        ("note", view.entry.notes.note),
    ]
    lines += [f"  {label + ':':<9} {printable_line(text)}" for label, text in rows if text]
    return "\n".join(lines)


def to_json(view: RunView) -> dict[str, Any]:
    return {
        "run": str(view.folder.path),
        "state": view.state,
        "is_over": view.is_over,
        "status": view.status,
        "job": None if view.record is None else {**asdict(view.record), **(asdict(view.job) if view.job else {})},
        "job_trouble": view.trouble or None,
        "saved_step": view.saved_step,
        "now": view.now or None,
        "best_accuracy": view.entry.best_accuracy,
        "restarts": view.entry.restarts,
        "failure": view.failure or None,
        **asdict(view.entry.notes),
    }


def describe_place(folder: RunFolder) -> str:
    """In one line: the state of a run, and where its job is."""
    view = look(folder)
    job = _job_line(view)
    return printable_line(f"the run is {view.state}" + (f", job {job}" if job else ""))


# --- One line each ----------------------------------------------------------------------------------------------------


def _progress(view: RunView) -> str:
    step, last = view.entry.step, view.entry.last_step
    if step is None:
        return ""
    text = f", step {step:,}"
    if last is not None and last > 0:
        text += f" of {last:,} ({step / last:.0%})"
    if view.state == "running" and view.entry.eta_s is not None:
        text += f", about {in_words_s(view.entry.eta_s)} left"
    accuracy, value = view.entry.test_accuracy, view.entry.test_value
    if view.entry.test_metric and value is not None:
        return f"{text}, test {view.entry.test_metric} {value:.4g}"
    return text + (f", test accuracy {accuracy:.2%}" if accuracy is not None else "")


def _job_line(view: RunView) -> str:
    if view.record is None:
        return ""
    name, job = f"{view.record.job_id}", view.job
    if job is None:
        return f"{name}: {view.trouble}"
    if not job.state:
        scheduler = {"slurm": "Slurm", "kubernetes": "the cluster"}.get(view.record.scheduler, view.record.scheduler)
        kept = "; it was deleted, or ended more than 7 days ago" if view.is_kubernetes else ""
        return f"{name}: {scheduler} does not know it any more{kept}"
    if job.tasks:
        counts = ", ".join(f"{count} {state.lower()}" for state, count in job.tasks.items())
        return f"{name}: {counts} (paceline status {view.folder.path}/task-N)"
    text = f"{name}: {job.state.lower()}"
    is_telling = job.state == "PENDING" or view.record.scheduler == "kubernetes"
    text += f" ({_explain(view.record, job.reason)})" if job.reason and is_telling else ""
    text += f", expected to start {job.expected_start.replace('T', ' ')}" if job.expected_start else ""
    text += f" on {job.nodes}" if job.nodes else ""
    text += f" for {job.running_for}" if job.is_active and job.running_for else ""
    text += f", {job.time_left} left" if job.time_left else ""
    text += f", exit code {job.exit_code}" if job.exit_code not in ("", "0:0") else ""
    if not job.restarts:
        return text
    if view.record.scheduler == "kubernetes":
        return f"{text}; failures so far: {job.restarts}"
    return f"{text}; requeued {job.restarts} time" + ("s" if job.restarts > 1 else "")


def _explain(record: JobRecord, reason: str) -> str:
    """Slurm's own word, and what it means."""
    waiting = explain_reason(reason) if record.scheduler == "slurm" else None
    return reason if waiting is None else f"{reason}: {str(waiting).replace('JOB', record.job_id)}"


def _now_line(view: RunView) -> str:
    """The progress of a running run, from its files: also on a machine that never saw its processes."""
    if view.is_over or not view.now:
        return ""
    try:
        accuracy = f" acc {view.now['accuracy']:.1%}," if "accuracy" in view.now else ""
        return (
            f"loss {view.now['loss']:.4f},{accuracy} {view.now['throughput']:,.0f} img/s,"
            f" {view.now['memory_mb']:,.0f} MB"
        )
    except (KeyError, TypeError, ValueError, OverflowError):  # the row may come from elsewhere
        return ""


def _best_line(view: RunView) -> str:
    best, restarts = view.entry.best_accuracy, view.entry.restarts
    parts = [f"validation accuracy {best:.2%}"] if best is not None else []
    parts += [f"{restarts} restart" + ("s" if restarts > 1 else "")] if restarts else []
    return ", ".join(parts)


def _mirror_line(view: RunView) -> str:
    note = read_own_note(view.folder.path)
    return f"{note.url} {note.says}".rstrip() if note else ""


def _updated(view: RunView) -> str:
    try:
        updated = datetime.fromisoformat(str(view.status.get("updated"))).astimezone()
    except (ValueError, OverflowError, OSError):
        return ""
    age_s = (datetime.now().astimezone() - updated).total_seconds()
    by = f" by {view.status.get('host')} pid {view.status.get('pid')}"
    return (f"{in_words_s(age_s)} ago" if age_s >= 0 else updated.isoformat(" ")) + by


def _reason(view: RunView) -> str:
    if view.state == "lost" and view.owner is not None and view.job is None:
        return f"its process is gone ({view.owner})"
    if view.state == "running" and view.entry.state == "silent" and view.job is None:
        return (
            f"no update for long, and its process cannot be seen from here ({view.owner or 'no process has its lock'})"
        )
    return str(view.status.get("reason") or "").partition("\n")[0]


def _failure_line(view: RunView) -> str:
    failure = view.failure
    if not failure:
        return ""
    what = str(failure.get("what", "")).partition("\n")[0]
    done = f"; {failure['done']}" if failure.get("done") else ""
    return f"attempt {failure.get('attempt')} of {failure.get('attempts')}: {what}{done}"


def _newest_saved_step(folder: RunFolder) -> int:
    """Of the newest checkpoint whose manifest, sizes and headers are right; 0 if none is, or it cannot be read."""
    try:
        for path in step_folders(folder.checkpoints):
            with suppress(DamagedCheckpoint):
                inspect_checkpoint(path)
                return step_of(path)
    except (UnreadableNow, OSError):
        return 0
    return 0
