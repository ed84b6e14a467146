"""How many CPU cores this process may use: by its affinity, its container's quota and its Slurm allocation.

The smallest of the three is used. If a site does not bind tasks to cores, every task sees the whole node. The Slurm
allocation then keeps ranks from starting more threads than granted. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.runtime.slurm import count_granted_cpus

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Cores of this process: in a container or a job fewer than the machine has."""
    limits = [_affinity(), _cgroup_quota(), count_granted_cpus(environment)]
    return max(1, min(limit for limit in limits if limit is not None))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroup_quota() -> int | None:
    """Whole cores of a container's CPU limit (`docker run --cpus`, Kubernetes limits); None without one."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        quota, period = (_CGROUPS / group / "cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or the word "max"
        return None
