"""A task of Slurm: reads its environment, and requeues the job before its time limit. Imports no torch.

`srun` gives every task its number, its node and the list of nodes. The rendezvous needs nothing else. The port is
derived from the job id, so two jobs on one node do not collide, and from the restart count, so a requeued job does not
connect to processes of its earlier start.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.runs.json_files import COUNT, Fields, read_objects
from paceline.settings.small_files import write_plain
from paceline.settings.values import MAX_REQUEUES, read_whole

_FIRST_PORT, _PORTS = 20_000, 20_000
_LARGEST_STEP = 4_000_000_000  # larger ids are Slurm's own steps, for example the batch script
_MAX_REQUEUES = 3
_WARNINGS = ("SIGUSR1", "SIGUSR2")  # sent by `sbatch --signal`; Slurm itself requeues a preempted job
_TIMEOUT_S = 20


@dataclass(frozen=True)
class SlurmTask:
    """This task's place in its step."""

    job_id: str
    task: int
    tasks: int
    local_task: int
    local_tasks: int
    node: int
    nodes: int
    hosts: tuple[str, ...]
    port: int


def read_slurm_task(environment: Mapping[str, str]) -> SlurmTask | None:
    """None outside of a step that `srun` started."""
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) > _LARGEST_STEP or "SLURM_PROCID" not in environment:
        return None
    try:
        node = int(environment["SLURM_NODEID"])
        per_node = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
        return SlurmTask(
            job_id=environment["SLURM_JOB_ID"],
            task=int(environment["SLURM_PROCID"]),
            tasks=int(environment["SLURM_STEP_NUM_TASKS"]),
            local_task=int(environment["SLURM_LOCALID"]),
            local_tasks=per_node[node],
            node=node,
            nodes=int(environment["SLURM_STEP_NUM_NODES"]),
            hosts=expand_hosts(environment["SLURM_STEP_NODELIST"]),
            port=_port(int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_RESTART_COUNT", "0"))),
        )
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            "Slurm's environment is incomplete or contradicts itself",
            got=f"{type(error).__name__}: {error}",
            hint="start with srun, or unset the SLURM_* variables to run on this machine alone",
        ) from error


def count_granted_cpus(environment: Mapping[str, str]) -> int | None:
    """CPUs that Slurm granted to this process. None outside of a job, or if Slurm does not set the variables.

    A task of a step has its `--cpus-per-task`. Without that, the tasks of a node share the CPUs of the step on that
    node. A batch script, and processes that it starts directly, have all CPUs of the job on their node.
    """
    if "SLURM_JOB_ID" not in environment:
        return None
    per_task, on_node = (environment.get(name, "") for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"))
    task = read_slurm_task(environment)
    if task is not None and per_task.isdecimal():
        return int(per_task)
    if not on_node.isdecimal():
        return None
    return int(on_node) // (task.local_tasks if task is not None else 1)


def _port(job_id: int, restarts: int) -> int:
    return _FIRST_PORT + (job_id * 64 + restarts) % _PORTS


def expand_hosts(text: str) -> tuple[str, ...]:
    """`n[1-3,07],login` as names, in order."""
    hosts: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)?", text):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if match is None:
            hosts.append(part)
            continue
        prefix, ranges, suffix = match.groups()
        for span in ranges.split(","):
            low, _, high = span.partition("-")
            for number in range(int(low), int(high or low) + 1):
                hosts.append(f"{prefix}{number:0{len(low)}}{suffix}")
    return tuple(hosts)


def expand_counts(text: str) -> list[int]:
    """`2(x3),1` as [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"not a list of tasks per node: {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def job_to_requeue(signal_name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The job id for `scontrol requeue`. None outside of Slurm, on later nodes, and for other signals."""
    if signal_name not in _WARNINGS or "SLURM_JOB_ID" not in environment:
        return None
    if environment.get("SLURM_NODEID", "0") != "0":
        return None
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]


def returns_without_progress(path: Path, step: int) -> int:
    """How often in a row the job was requeued without a step after this one."""
    count = 0
    for row in reversed(read_objects(path, Fields(required={"step": COUNT}))):
        if row["step"] < step:
            break
        count += 1
    return count


def requeue_job(signal_name: str, path: Path, step: int) -> None:
    """Requeue after the warning before the time limit. `path` is the run's list of requeues, `step` the saved step.

    After a few requeues in a row without progress the job is not requeued again. Otherwise it would repeat for ever.
    """
    job = job_to_requeue(signal_name)
    if job is None or shutil.which("scontrol") is None:
        return
    most = read_whole(MAX_REQUEUES, _MAX_REQUEUES)
    count = returns_without_progress(path, step)
    if count >= most:
        _print_message(f"Slurm job {job} is not requeued: it was requeued {count} times without a step of progress")
        return
    line = json.dumps({"job": job, "step": step, "time": time.time()}) + "\n"
    write_plain(path, line.encode(), appends=True)
    try:
        answer = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        _print_message(f"warning: scontrol requeue {job} did not answer within {_TIMEOUT_S} s")
        return
    if answer.returncode == 0:
        _print_message(f"Slurm job {job} is back in the queue")
    else:
        _print_message(f"warning: scontrol requeue {job} failed: {answer.stderr.strip()}")


def _print_message(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
