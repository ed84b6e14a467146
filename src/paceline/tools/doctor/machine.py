"""Memory, shared memory, limits and cores of this node that this process may use. Imports no torch."""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from paceline.runtime.resources import usable_cores
from paceline.tools.doctor.findings import DoctorFinding, failed, passed, warned

# --- Facts ------------------------------------------------------------------------------------------------------------


_SHM = Path("/dev/shm")
_CGROUP = Path("/sys/fs/cgroup")
_NUMA = Path("/sys/devices/system/node")
_UNLIMITED_BYTES = 2**60  # cgroup v1 writes a huge number for "no limit"


@dataclass(frozen=True)
class MemoryFacts:
    shm_total_bytes: int | None  # None: there is no /dev/shm
    shm_free_bytes: int
    total_bytes: int
    available_bytes: int
    limit_bytes: int | None  # of the container or job
    open_files: int
    open_files_hard: int


@dataclass(frozen=True)
class Cores:
    machine: int
    usable: int  # by affinity
    quota: float | None  # of CPU time, by cgroup
    numa_nodes: int
    numa_used: int  # NUMA nodes of the usable cores
    load: float
    omp_num_threads: str


def gather_memory(shm: Path = _SHM, cgroup: Path = _CGROUP) -> MemoryFacts:
    total, free = None, 0
    if shm.is_dir():
        about = os.statvfs(shm)
        total, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
    meminfo = _meminfo()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MemoryFacts(
        shm_total_bytes=total,
        shm_free_bytes=free,
        total_bytes=meminfo.get("MemTotal", 0),
        available_bytes=meminfo.get("MemAvailable", 0),
        limit_bytes=_memory_limit(cgroup),
        open_files=_unlimited(soft),
        open_files_hard=_unlimited(hard),
    )


def _unlimited(limit: int) -> int:
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def _meminfo() -> dict[str, int]:
    found = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            found[name] = int(rest.split()[0]) * 1024
    return found


def _memory_limit(cgroup: Path) -> int | None:
    """The smallest limit from the root to this process's own group."""
    limits = []
    for folder in _own_groups(cgroup, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name).strip()
            if text.isdecimal() and int(text) < _UNLIMITED_BYTES:
                limits.append(int(text))
    return min(limits, default=None)


def _own_groups(cgroup: Path, controller: str) -> list[Path]:
    """The folders of this process's group and of all its parents."""
    folders = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if names == "" or controller in names.split(","):
            own = (cgroup / names if names else cgroup) / path.strip("/")
            folders += [own, *own.parents]
    return [folder for folder in folders if folder.is_relative_to(cgroup)] or [cgroup]


def gather_cores(cgroup: Path = _CGROUP, numa: Path = _NUMA) -> Cores:
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    nodes = [_parse_cpus(_read(folder / "cpulist")) for folder in sorted(numa.glob("node[0-9]*"))]
    return Cores(
        machine=os.cpu_count() or 1,
        usable=usable_cores(),
        quota=_cpu_quota(cgroup),
        numa_nodes=max(1, len(nodes)),
        numa_used=max(1, sum(bool(cpus & usable) for cpus in nodes)),
        load=os.getloadavg()[0],
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
    )


def _cpu_quota(cgroup: Path) -> float | None:
    quotas = []
    for folder in _own_groups(cgroup, "cpu"):
        quota, period, *_ = [*_read(folder / "cpu.max").split(), "", ""]
        if not quota:
            quota, period = (_read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _parse_cpus(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdecimal():
            cpus.update(range(int(low), int(high or low) + 1))
    return cpus


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# --- Checks -----------------------------------------------------------------------------------------------------------


_MEGABYTE, _GIGABYTE = 2**20, 2**30
_SHM_NEEDED = 32 * _MEGABYTE  # per rank: NCCL's buffers and a few pages of ours
_SHM_WANTED = 128 * _MEGABYTE
_FILES_NEEDED, _FILES_WANTED = 256, 1024
_RANK_BYTES = 1 * _GIGABYTE  # torch alone, before any model


def check_shared_memory(facts: MemoryFacts, local_ranks: int) -> DoctorFinding:
    if facts.shm_total_bytes is None:
        return failed("shared memory", "there is no /dev/shm", "mount -t tmpfs tmpfs /dev/shm")
    what = f"/dev/shm has {_size(facts.shm_free_bytes)} free of {_size(facts.shm_total_bytes)}"
    remedy = "docker run --shm-size=8g (or --ipc=host); Kubernetes: an emptyDir of medium Memory at /dev/shm; "
    remedy += "if it is full: remove files that crashed programs left there"
    for needed, report in ((_SHM_NEEDED, failed), (_SHM_WANTED, warned)):
        if facts.shm_free_bytes < needed * local_ranks:
            wants = f"{local_ranks} rank{'s need' if local_ranks > 1 else ' needs'} {_size(needed * local_ranks)}"
            return report("shared memory", f"{what}; {wants}", remedy)
    return passed("shared memory", what)


def check_open_files(facts: MemoryFacts) -> DoctorFinding:
    what = f"a process may open {facts.open_files:,} files"
    remedy = f"ulimit -n {min(facts.open_files_hard, 65536)}"
    if facts.open_files_hard < _FILES_WANTED:
        remedy = "raise the hard limit: nofile in /etc/security/limits.conf, LimitNOFILE= of slurmd, docker --ulimit"
    for needed, report in ((_FILES_NEEDED, failed), (_FILES_WANTED, warned)):
        if facts.open_files < needed:
            return report("open files", f"{what}, and {needed:,} are needed", remedy)
    return passed("open files", what)


def check_memory(facts: MemoryFacts, local_ranks: int) -> DoctorFinding:
    available = facts.available_bytes
    limit = ""
    if facts.limit_bytes is not None and facts.limit_bytes < facts.total_bytes:
        available = min(available, facts.limit_bytes)
        limit = f", and this job or container may use {_size(facts.limit_bytes)}"
    what = f"{_size(facts.available_bytes)} available of {_size(facts.total_bytes)}{limit}"
    if available < local_ranks * _RANK_BYTES:
        what += f"; {local_ranks} rank{'s need' if local_ranks > 1 else ' needs'} {_size(local_ranks * _RANK_BYTES)}"
        return warned("memory", what, "fewer --processes, or more memory: --mem of a job, the limit of a container")
    return passed("memory", what)


def check_cores(facts: Cores, local_ranks: int) -> DoctorFinding:
    room = facts.usable if facts.quota is None else min(facts.usable, math.ceil(facts.quota))
    what = f"{facts.usable} of {facts.machine} cores"
    if facts.quota is not None and facts.quota < facts.usable:
        what += f", but CPU time for only {facts.quota:g} of them"
    if facts.numa_nodes > 1:
        what += f", in {facts.numa_used} of {facts.numa_nodes} NUMA nodes"
    threads = int(facts.omp_num_threads) if facts.omp_num_threads.isdecimal() else 1
    if room < local_ranks * threads:
        each = f" with OMP_NUM_THREADS={threads}" if threads > 1 else ""
        what += f" for {local_ranks} ranks{each}"
        return warned("cores", what, "fewer --processes, or more CPUs: --cpus-per-task of a job, --cpus of a container")
    if facts.load > 0.75 * facts.machine:
        what += f"; other processes use them (load {facts.load:.1f})"
        return warned("cores", what, "top shows the processes; measured speeds will vary")
    return passed("cores", what)


def _size(size_bytes: float) -> str:
    if size_bytes >= _GIGABYTE:
        return f"{size_bytes / _GIGABYTE:.1f} GB"
    return f"{size_bytes / _MEGABYTE:.0f} MB"
