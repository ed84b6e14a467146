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
from paceline.launch.job import JobSpec

_PARTITIONS = "sinfo -o '%P %a %l %D %c %G' lists partitions with their limits, nodes, CPUs and GPUs"
_ACCOUNTS = "sacctmgr show assoc user=$USER format=account,partition,qos lists yours"
_CONTROLLER = "scontrol ping shows whether the controller is up; try again when it is"
# The first match is used. Slurm's messages change slightly between versions, so the patterns match only their core.
_HINTS = (
    (r"account or account/partition combination|invalid account", f"another --account: {_ACCOUNTS}"),
    (r"qos", f"another --qos: {_ACCOUNTS}"),
    (r"group not permitted|not permitted to use this partition", f"another --partition: {_PARTITIONS}"),
    (r"invalid partition|no partition specified", f"another --partition: {_PARTITIONS}"),
    (r"partition.*not available|partition.*(down|inactive|drain)", f"another --partition: {_PARTITIONS}"),
    (r"time limit", f"a shorter --time: {_PARTITIONS}"),
    (r"node count|too many nodes", f"another --nodes: {_PARTITIONS}"),
    (
        r"memory specification|memory required",
        "a smaller --mem: sinfo -o '%P %m' lists the memory of nodes in megabytes",
    ),
    (r"generic resource|gres|gpu", "other GPUs: sinfo -o '%P %G' lists those of each partition"),
    (r"feature specification", "another --constraint: sinfo -o '%P %f' lists features"),
    (r"reservation", "another --reservation: scontrol show reservation lists them"),
    (r"node configuration is not available|cpu count", f"fewer CPUs or GPUs per node, or fewer nodes: {_PARTITIONS}"),
    (r"node name", "sinfo --Node lists nodes"),
    (r"job array", "a smaller --array: scontrol show config | grep MaxArraySize"),
    (r"policy limit|limit.*(size|resources)|submit limit", "wait until your other jobs end, or ask the site's support"),
    (r"requeue", "remove the requeue line; ask the site's support whether jobs may be requeued"),
    (r"credential|munge|authentication", "munge -n | unmunge shows whether munge works; contact the site's support"),
    (r"unable to contact|connection refused|connect failure|socket timed out|timed out|zero bytes", _CONTROLLER),
    (r"configuration source|slurm\.conf", "no cluster is configured here: log in to the cluster, or set SLURM_CONF"),
    (r"access.*denied|permission", "ask the site's support"),
    (r"invalid (option|argument)|unrecognized option|illegal", "paceline submit slurm ... --dry-run prints the script"),
)
# The job may be in the queue: perhaps only the answer was lost.
_ANSWER_LOST = re.compile(r"socket timed out|timed out", re.IGNORECASE)
CLIENT_TIMEOUT_S = 20.0
_QUICK_TIMEOUT_S = 3.0  # for a list that is useful without the answer
_ACTIVE = (
    *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"),
    *("RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
)


# Hints for jobs that sbatch refuses, chosen by its error message.


def hint_for(message: str) -> str | None:
    """None for an unknown message, for example from a plugin of the site."""
    found = next((hint for pattern, hint in _HINTS if re.search(pattern, message, re.IGNORECASE)), None)
    if found is not None and _ANSWER_LOST.search(message):
        return f"squeue --me shows whether the job is in the queue\n{found}"
    return found


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


def read_own_queue(cluster: str = "") -> set[str]:
    """The ids of all jobs of this user that wait or run."""
    answer = _client("squeue", *_on(cluster), "--me", "--noheader", "--format=%A %F", timeout_s=_QUICK_TIMEOUT_S)
    if answer.returncode:
        raise SlurmUnavailable("squeue failed", got=_first_lines(answer.stderr))
    return set(answer.stdout.split())


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


def _client(name: str, *arguments: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    timeout_s = CLIENT_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        return subprocess.run(
            [name, *arguments], capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except FileNotFoundError as error:
        raise SlurmUnavailable(f"there is no {name} on this machine", where="PATH") from error
    except subprocess.TimeoutExpired as error:
        note = "; the job may be in the queue: squeue --me" if name == "sbatch" else ""
        raise SlurmUnavailable(
            f"{name} did not answer within {timeout_s:g} s", hint=f"is the controller up? scontrol ping{note}"
        ) from error


def _on(cluster: str) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []


def _named(nodes: str) -> str:
    return "" if nodes in ("(null)", "None assigned", "None") else nodes


def _first_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[:4]) or "no message"


# Explain why a Slurm job is pending, and whether it can start at all.


@dataclass(frozen=True)
class Waiting:
    """What a pending reason means. `never`: the job does not start without a change by a person."""

    reason: str
    hint: str = ""
    never: bool = False

    def __str__(self) -> str:
        end = "; it will not start by itself" if self.never else ""
        return self.reason + end + (f": {self.hint}" if self.hint else "")


_JOBS_END = "it starts when jobs end that use the same account or QOS"
_REASONS = {
    "Priority": Waiting("jobs with a higher priority are first"),
    "Resources": Waiting("its nodes, CPUs or GPUs are in use"),
    "Dependency": Waiting("it waits for another job"),
    "DependencyNeverSatisfied": Waiting("the job it waits for has failed", "cancel it and submit again", never=True),
    "BeginTime": Waiting("its start time is not reached; a requeued job waits about two minutes"),
    "JobHeldUser": Waiting("it is held", "scontrol release JOB", never=True),
    "JobHeldAdmin": Waiting("an administrator holds it", "ask the site's support", never=True),
    "JobHoldMaxRequeue": Waiting("it was requeued too often and is held", "scontrol release JOB", never=True),
    "JobArrayTaskLimit": Waiting("its array has reached the limit of running tasks"),
    "Licenses": Waiting("the licenses it needs are in use"),
    "Reservation": Waiting("its reservation has not started"),
    "ReservationDeleted": Waiting("its reservation was deleted", "submit without --reservation", never=True),
    "Prolog": Waiting("the site prepares its nodes"),
    "Cleaning": Waiting("its earlier start is being cleaned up"),
    "NodeDown": Waiting("a node it needs is down", "sinfo -R shows why"),
    "ReqNodeNotAvail": Waiting("a node it needs is down, drained or reserved", "sinfo -R shows why"),
    "BadConstraints": Waiting("no node has what it requests", "sinfo -o '%P %D %c %G %f' lists them", never=True),
    "PartitionDown": Waiting("its partition is down until an administrator opens it", "another --partition"),
    "PartitionInactive": Waiting("its partition is inactive until an administrator opens it", "another --partition"),
    "PartitionNodeLimit": Waiting("its partition does not allow this many nodes", "fewer --nodes", never=True),
    "PartitionTimeLimit": Waiting("its partition does not allow this much time", "a shorter --time", never=True),
    "PartitionConfig": Waiting("its partition does not allow what it requests", "another --partition", never=True),
    "AccountNotAllowed": Waiting("its account may not use the partition", "another --account", never=True),
    "QOSNotAllowed": Waiting("its QOS may not use the partition", "another --qos", never=True),
    "InvalidAccount": Waiting("its account is not valid", "sacctmgr show assoc user=$USER lists yours", never=True),
    "InvalidQOS": Waiting("its QOS is not valid", "sacctmgr show qos lists them", never=True),
    "JobLaunchFailure": Waiting("it could not be started on its node", "scontrol release JOB", never=True),
    "MaxMemPerLimit": Waiting("the partition does not allow this much memory", "a smaller --mem", never=True),
    "DeadLine": Waiting("its deadline cannot be met", "submit again without --deadline", never=True),
    "SystemFailure": Waiting("Slurm or a node failed while it started", "scontrol release JOB", never=True),
    "BurstBufferResources": Waiting("the burst buffer it needs is in use"),
    "BurstBufferStageIn": Waiting("its data is copied into the burst buffer"),
    "BurstBufferOperation": Waiting("the burst buffer failed", "ask the site's support", never=True),
    "FedJobLock": Waiting("the clusters of the federation decide which one starts it"),
    "SchedDefer": Waiting("Slurm looks for free nodes in its next round"),
    "MaxPoweredUpNodes": Waiting("the site's limit of powered-up nodes is reached"),
    "QOSUsageThreshold": Waiting("its QOS has used more than its share"),
}
# Limits have a name for each kind of resource. Limits of one job are permanent; limits of a group end with other jobs.
_PATTERNS = (
    (r"(QOS|Assoc)Max\w*PerJob\w*|(QOS|Assoc)Max\w*PerNode", "one job may not request this much", "request less", True),
    (r"QOSMin\w*", "one job must request more", "another --qos", True),
    (r"(QOS|Assoc)Grp\w*RunMin\w*", "running jobs of the account or QOS have too much time left", _JOBS_END, False),
    (r"(QOS|Assoc)Grp\w*Minutes\w*", "the account or QOS has used its time", "ask the site's support", False),
    (r"(QOS|Assoc|Association)\w*|Max\w+PerAccount", "the account or QOS has reached its limit", _JOBS_END, False),
    (r"Nodes required for job are DOWN.*", "nodes it needs are down or drained", "sinfo -R shows why", False),
    # Slurm sometimes reports a sentence instead of a name.
    (r"Job's account .*", "its account may not use the partition", "another --account or --partition", True),
    (r"Job's QOS .*", "its QOS may not use the partition", "another --qos or --partition", True),
    (r".*requeued held|.*held state", "it could not be started and is held", "scontrol release JOB", True),
)


def explain_reason(reason: str) -> Waiting | None:
    """None for an unknown reason: a site may have its own."""
    name = reason.strip("()").partition(",")[0].strip()
    if name in _REASONS:
        return _REASONS[name]
    for pattern, reason, hint, never in _PATTERNS:
        if re.fullmatch(pattern, name):
            return Waiting(reason, hint, never)
    return None
