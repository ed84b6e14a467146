"""Versions of Python, of the declared packages, and of torch, with the GPUs that torch sees."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import paceline

_PROBE_S = 35.0
# Run in a separate process: a torch that cannot be loaded, or a driver that hangs, must not stop the doctor.
_PROBE = """
import json, sys
import torch
found = {"version": torch.__version__, "cuda_build": torch.version.cuda, "devices": []}
found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
found["has_gloo"] = torch.distributed.is_available() and torch.distributed.is_gloo_available()
found["has_nccl"] = torch.distributed.is_available() and torch.distributed.is_nccl_available()
if torch.version.cuda is not None:
    if found["has_nccl"]:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["architectures"] = torch.cuda.get_arch_list()
    try:
        torch.cuda.init()
    except Exception as error:
        found["cuda_error"] = str(error).splitlines()[0]
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        device = {"name": about.name, "capability": f"{about.major}{about.minor}"}
        found["devices"].append({**device, "free_bytes": free, "total_bytes": total})
sys.stdout.write("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class Software:
    paceline: str
    python: str
    needs_python: str  # as declared: ">=3.11"
    packages: dict[str, str]  # installed version, empty if there is none
    needs: dict[str, str]  # declared range, for example ">=2.11"
    platform: str


@dataclass(frozen=True)
class Torch:
    version: str = ""
    cuda_build: str | None = None
    cpu_capability: str = ""
    has_gloo: bool = False
    has_nccl: bool = False
    nccl: str = ""
    architectures: tuple[str, ...] = ()
    devices: tuple[dict[str, Any], ...] = ()
    cuda_error: str = ""
    error: str = ""  # why torch cannot be loaded at all
    driver: str = ""  # from nvidia-smi
    driver_gpus: int = 0
    busy: tuple[str, ...] = field(default_factory=tuple)  # other processes on the GPUs


def gather_software() -> Software:
    needs = {}
    for line in _declared():
        requirement, _, condition = line.partition(";")
        match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(.*)", requirement)
        if match and "extra" not in condition:
            needs[match[1]] = match[2].strip()
    return Software(
        paceline=paceline.__version__,
        python=platform.python_version(),
        needs_python=_needed_python(),
        packages={name: _version(name) for name in needs},
        needs=needs,
        platform=platform.platform(),
    )


def _declared() -> list[str]:
    """Empty if paceline runs from its sources and is not installed."""
    try:
        return metadata.requires("paceline") or []
    except metadata.PackageNotFoundError:
        return []


def _needed_python() -> str:
    try:
        return str(metadata.metadata("paceline").json.get("requires_python", ""))
    except metadata.PackageNotFoundError:
        return ""


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def gather_torch() -> Torch:
    driver, gpus, busy = _ask_driver()
    try:
        probe = [sys.executable, "-c", _PROBE]
        done = subprocess.run(probe, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return Torch(error=f"importing torch takes longer than {_PROBE_S:.0f} s", driver=driver, driver_gpus=gpus)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
        return Torch(error=lines[-1][:300], driver=driver, driver_gpus=gpus)
    found = json.loads(done.stdout.rpartition("\n")[2])
    found = {**found, "devices": tuple(found["devices"]), "architectures": tuple(found.get("architectures", ()))}
    return Torch(**found, driver=driver, driver_gpus=gpus, busy=busy)


def _ask_driver() -> tuple[str, int, tuple[str, ...]]:
    versions = _nvidia_smi("--query-gpu=driver_version").split()
    apps = _nvidia_smi("--query-compute-apps=pid,process_name,used_memory").splitlines()
    return versions[0] if versions else "", len(versions), tuple(line.strip() for line in apps if line.strip())


def _nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
