"""Checks of shared memory, open files, memory limits and cores."""

from __future__ import annotations

import math

from paceline.tools.doctor.findings import Finding, failed, passed, warned
from paceline.tools.doctor.gather.machine import Cores, Memory

_MEGABYTE, _GIGABYTE = 2**20, 2**30
_SHM_NEEDED = 32 * _MEGABYTE  # per rank: NCCL's buffers and a few pages of ours
_SHM_WANTED = 128 * _MEGABYTE
_FILES_NEEDED, _FILES_WANTED = 256, 1024
_RANK_BYTES = 1 * _GIGABYTE  # torch alone, before any model


def check_shared_memory(facts: Memory, local_ranks: int) -> Finding:
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


def check_open_files(facts: Memory) -> Finding:
    what = f"a process may open {facts.open_files:,} files"
    remedy = f"ulimit -n {min(facts.open_files_hard, 65536)}"
    if facts.open_files_hard < _FILES_WANTED:
        remedy = "raise the hard limit: nofile in /etc/security/limits.conf, LimitNOFILE= of slurmd, docker --ulimit"
    for needed, report in ((_FILES_NEEDED, failed), (_FILES_WANTED, warned)):
        if facts.open_files < needed:
            return report("open files", f"{what}, and {needed:,} are needed", remedy)
    return passed("open files", what)


def check_memory(facts: Memory, local_ranks: int) -> Finding:
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


def check_cores(facts: Cores, local_ranks: int) -> Finding:
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
