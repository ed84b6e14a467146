"""Requeues a Slurm job after the warning before its time limit, when it has saved.

Each requeue is written to the run folder with the saved step. After a few requeues in a row without progress the job
is not requeued again. Otherwise it would repeat for ever.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.runs.json_files import COUNT, Fields, read_objects
from paceline.settings.small_files import write_plain
from paceline.settings.variables import MAX_REQUEUES, read_whole

_MAX_REQUEUES = 3
_WARNINGS = ("SIGUSR1", "SIGUSR2")  # sent by `sbatch --signal`; Slurm itself requeues a preempted job
_TIMEOUT_S = 20


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
    """`path` is the run's list of requeues, `step` the saved step."""
    job = job_to_requeue(signal_name)
    if job is None or shutil.which("scontrol") is None:
        return
    most = read_whole(MAX_REQUEUES, _MAX_REQUEUES)
    count = returns_without_progress(path, step)
    if count >= most:
        _tell(f"Slurm job {job} is not requeued: it was requeued {count} times without a step of progress")
        return
    line = json.dumps({"job": job, "step": step, "time": time.time()}) + "\n"
    write_plain(path, line.encode(), appends=True)
    try:
        answer = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        _tell(f"warning: scontrol requeue {job} did not answer within {_TIMEOUT_S} s")
        return
    if answer.returncode == 0:
        _tell(f"Slurm job {job} is back in the queue")
    else:
        _tell(f"warning: scontrol requeue {job} failed: {answer.stderr.strip()}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
