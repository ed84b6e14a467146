"""What this machine grants to a process: CPU cores, GPUs, open files, threads. Imports no torch."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import UserError
from paceline.runtime.slurm import count_granted_cpus

_CGROUPS = Path("/sys/fs/cgroup")
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, WSL
OPEN_FILES_HINT = "ulimit -n 1024 in the shell or the job script; if that is refused, ask the administrator"
THREADS_HINT = (
    "raise ulimit -u, or the limit of processes of the container (docker run --pids-limit, pids.max);\n"
    "or start fewer: --processes, --num-workers, --omp-num-threads"
)
_FEWEST = 40  # seen to be enough for two ranks on one machine; a run of many ranks needs more
_USUAL = 1024


def usable_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Cores of this process: the smallest of its affinity, its container's quota and its Slurm allocation.

    If a site does not bind tasks to cores, every task sees the whole node. The Slurm allocation then keeps ranks from
    starting more threads than granted.
    """
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


def count_gpus_without_torch() -> int | None:
    """None if only torch can count them. Importing torch would take seconds."""
    if "torch" in sys.modules or not sys.platform.startswith("linux"):
        return None
    if not any(Path(driver).exists() for driver in _DRIVERS) or _is_built_without_cuda():
        return 0
    count = _ask_nvidia()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count is None or visible is None:
        return count
    numbers = visible.split(",")
    is_plain = all(number.isdigit() and int(number) < count for number in numbers) and len(set(numbers)) == len(numbers)
    return len(numbers) if is_plain else None


def _is_built_without_cuda() -> bool:
    """Read from the file in which torch keeps its build settings."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    version = Path(torch.origin).with_name("version.py")
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    return all(re.search(rf"^{name}\b.*= None$", text, re.MULTILINE) for name in ("cuda", "hip"))


def _ask_nvidia() -> int | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
    except (OSError, AttributeError):
        return None
    return count.value


def require_open_files() -> None:
    """Raise the limit to 1024 if the hard limit allows it. Children inherit it. UserError if a run cannot start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _USUAL:
        return
    wanted = _USUAL if hard == resource.RLIM_INFINITY else min(hard, _USUAL)
    if wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < _FEWEST:
        raise UserError(
            "a process may open too few files here",
            where="the limit of open files (ulimit -n)",
            got=str(wanted),
            allowed=f"{_FEWEST} or more; {_USUAL} is usual",
            hint=OPEN_FILES_HINT,
        )
