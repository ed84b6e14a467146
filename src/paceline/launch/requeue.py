"""Slurm's warning before the time limit: the job goes back into the queue, once it has saved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

_WARNINGS = ("SIGUSR1", "SIGUSR2")  # what `sbatch --signal` sends; a preempted job is requeued by Slurm itself


def job_to_requeue(signal_name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The id to give to `scontrol requeue`; None outside of Slurm, on all nodes but the first, for other signals."""
    if signal_name not in _WARNINGS or "SLURM_JOB_ID" not in environment:
        return None
    if environment.get("SLURM_NODEID", "0") != "0":
        return None
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]


def requeue_job(signal_name: str) -> None:
    job = job_to_requeue(signal_name)
    if job is None or shutil.which("scontrol") is None:
        return
    answer = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if answer.returncode == 0:
        print(f"Slurm job {job} is back in the queue", file=sys.stderr)
    else:
        print(f"warning: scontrol requeue {job} failed: {answer.stderr.strip()}", file=sys.stderr)
