"""Slurm's five command-line clients: submit a job, query its state, cancel it.

Every call has a time limit, because clients hang if the controller is down. No call needs accounting.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.errors import PacelineError, UserError
from paceline.integrations.slurm.facts import read_number
from paceline.integrations.slurm.refusals import hint_for
from paceline.launch.job import JobSpec

CLIENT_TIMEOUT_S = 20.0
_ACTIVE = (
    *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"),
    *("RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
)


class SlurmUnavailable(PacelineError):
    """A Slurm client is missing or did not answer in time."""


@dataclass(frozen=True)
class JobState:
    """The state of a job in Slurm. Empty if Slurm does not know the job, or no longer."""

    job_id: str
    state: str = ""
    reason: str = ""
    nodes: str = ""
    expected_start: str = ""
    running_for: str = ""
    time_left: str = ""
    restarts: int = 0
    exit_code: str = ""
    tasks: dict[str, int] = field(default_factory=dict)  # for an array: the number of tasks by state

    @property
    def is_active(self) -> bool:
        return self.state in _ACTIVE


def require_sbatch() -> None:
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch on this machine",
            where="PATH",
            hint="log in to the cluster; --dry-run prints the script anywhere, paceline train runs it here",
        )


def submit_script(script: Path, spec: JobSpec | None = None) -> tuple[str, str]:
    """Returns the job id, and the cluster if there are several."""
    # A site may set SBATCH_EXPORT=NONE, but the job takes variables without a value from our environment.
    needs_variables = spec is not None and any("=" not in text for text in spec.env)
    answer = _client("sbatch", "--parsable", *(["--export=ALL"] if needs_variables else []), str(script))
    if answer.returncode:
        raise UserError(
            "sbatch refuses the job",
            where=str(script),
            got=_first_lines(answer.stderr),
            hint=hint_for(answer.stderr) or "correct the setting in the message, or contact the site's support",
        )
    found = re.search(r"^(\d+)(?:;(\S+))?$", answer.stdout, re.MULTILINE)
    if found is None:
        raise SlurmUnavailable("sbatch did not say the job's id", got=_first_lines(answer.stdout + answer.stderr))
    return found[1], found[2] or ""


def read_state(job_id: str, cluster: str = "") -> JobState:
    """Query the queue, then the controller, then accounting if the site has it."""
    state = _query_squeue(job_id, cluster)
    details = _query_scontrol(job_id, cluster)
    if state is None and details:
        state = JobState(job_id, state=details.get("JobState", ""), nodes=_named(details.get("NodeList", "")))
    if state is None:
        return _query_sacct(job_id, cluster) or JobState(job_id)
    restarts = details.get("Restarts", "0")
    code = "" if state.is_active else details.get("ExitCode", "")
    return replace(state, restarts=read_number(restarts) or 0, exit_code=code)


def cancel_job(job_id: str, cluster: str = "") -> None:
    answer = _client("scancel", *_on(cluster), job_id)
    if answer.returncode:
        raise PacelineError(f"job {job_id} could not be cancelled", got=_first_lines(answer.stderr))


def _query_squeue(job_id: str, cluster: str) -> JobState | None:
    """None if the job is not in the queue."""
    form = "--format=%i|%T|%r|%S|%M|%L|%N"
    answer = _client("squeue", *_on(cluster), "--jobs=" + job_id, "--states=all", "--noheader", form)
    if answer.returncode and "nvalid job id" not in answer.stderr:
        raise SlurmUnavailable("squeue failed", got=_first_lines(answer.stderr))
    rows = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == 6]
    if not rows:
        return None
    counts: dict[str, int] = {}
    for row in rows:
        counts[row[1]] = counts.get(row[1], 0) + 1
    # For an array, report the task that is furthest from its end.
    order = ["RUNNING", "COMPLETING", "PENDING", *_ACTIVE]
    _, state, reason, start, running_for, left, nodes = min(
        rows, key=lambda row: order.index(row[1]) if row[1] in order else len(order)
    )
    is_pending = state == "PENDING"
    return JobState(
        job_id,
        state=state,
        reason="" if reason == "None" else reason,
        nodes=_named(nodes),
        expected_start=start if is_pending and start != "N/A" else "",
        running_for="" if is_pending else running_for,
        time_left=left if state == "RUNNING" else "",
        tasks=counts if len(rows) > 1 else {},
    )


def _query_scontrol(job_id: str, cluster: str) -> dict[str, str]:
    """The controller knows the number of requeues. It forgets a job minutes after its end."""
    try:
        answer = _client("scontrol", *_on(cluster), "--oneliner", "show", "job", job_id)
    except SlurmUnavailable:
        return {}
    first = answer.stdout.splitlines()[:1] if answer.returncode == 0 else []
    return dict(re.findall(r"(\w+)=(\S*)", first[0])) if first else {}


def _query_sacct(job_id: str, cluster: str) -> JobState | None:
    """Query accounting, or the file of completed jobs that some sites keep instead."""
    for source, columns in ([], "State,NodeList,ExitCode"), (["--completion"], "State,NodeList"):
        try:
            only = [] if source else ["--allocations", *_on(cluster)]
            answer = _client(
                "sacct", *source, *only, "--jobs=" + job_id, "--noheader", "--parsable2", f"--format={columns}"
            )
        except SlurmUnavailable:
            return None
        rows = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == columns.count(",")]
        if answer.returncode == 0 and rows:
            state, nodes, *code = rows[-1]
            return JobState(job_id, state.split()[0] if state else "", nodes=_named(nodes), exit_code="".join(code))
    return None


def _client(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [name, *arguments], capture_output=True, text=True, errors="replace", timeout=CLIENT_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise SlurmUnavailable(f"there is no {name} on this machine", where="PATH") from error
    except subprocess.TimeoutExpired as error:
        note = "; the job may be in the queue: squeue --me" if name == "sbatch" else ""
        raise SlurmUnavailable(
            f"{name} did not answer within {CLIENT_TIMEOUT_S:g} s", hint=f"is the controller up? scontrol ping{note}"
        ) from error


def _on(cluster: str) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


def _named(nodes: str) -> str:
    return "" if nodes in ("(null)", "None assigned", "None") else nodes


def _first_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[:4]) or "no message"
