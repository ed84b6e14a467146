"""The identity of the launcher's job. All attempts of a job have the same identity, and no other job has it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.runs.machine import THIS_MACHINE
from paceline.runs.process_handle import stat_fields

_RUN_ID = "TORCHELASTIC_RUN_ID"
_NO_RUN_ID = "none"  # torchrun's default, the same for every job


def identify_job(environment: Mapping[str, str] = os.environ) -> str:
    """Empty if the launcher gives no identity.

    On one node, torchrun is identified by its agent process. On several nodes rank 0 may move to another agent, so the
    run id is used, which all agents share.
    """
    slurm_job = "-".join(environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID")).strip("-")
    run_id = environment.get(_RUN_ID, "")
    if run_id:
        has_other_nodes = environment.get("GROUP_WORLD_SIZE", "1") != "1"
        if has_other_nodes and run_id != _NO_RUN_ID:
            return f"torchrun {run_id} {slurm_job}".strip()
        pid = find_torchrun_agent()
        return f"torchrun {THIS_MACHINE.host} {THIS_MACHINE.boot_id} {pid} {THIS_MACHINE.process_start(pid)}"
    if slurm_job and "SLURM_PROCID" in environment:
        return f"srun {slurm_job}.{environment.get('SLURM_STEP_ID', '')}"
    return ""


def find_torchrun_agent() -> int:
    """The first ancestor process that torchrun did not start. A script may be between the rank and the agent."""
    pid = os.getppid()
    while _is_started_by_torchrun(pid):
        fields = stat_fields(pid)
        parent = int(fields[1]) if len(fields) > 1 else 0
        if parent <= 1:
            break
        pid = parent
    return pid


def _is_started_by_torchrun(pid: int) -> bool:
    try:
        names = [entry.partition(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    except OSError:
        return False
    return _RUN_ID.encode() in names
