"""Versions of Python, of the declared packages and of torch, and the GPUs that torch sees."""

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
from paceline.tools.doctor.findings import DoctorFinding, failed, passed, skipped, warned

# --- Facts ------------------------------------------------------------------------------------------------------------


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


# --- Checks -----------------------------------------------------------------------------------------------------------


_GIGABYTE = 10**9
_MOSTLY_FREE = 0.9  # fraction of a GPU's memory that is free if no other process uses it
_REINSTALL = "python -m pip install --upgrade paceline, in the environment you train in"


def check_python(facts: Software) -> DoctorFinding:
    if not _is_within(facts.python, facts.needs_python):
        return failed("python", f"{facts.python}, but {facts.needs_python} is needed", "a virtual environment with it")
    return passed("python", f"{facts.python} on {facts.platform}")


def check_packages(facts: Software) -> DoctorFinding:
    if not facts.needs:
        return skipped(
            "packages", f"paceline {facts.paceline} runs from its sources and is not installed: ranges unknown"
        )
    missing = [name for name, version in facts.packages.items() if not version and name != "isal"]
    wrong = [
        f"{name} {version} (needs {facts.needs[name]})"
        for name, version in facts.packages.items()
        if version and not _is_within(version, facts.needs[name])
    ]
    if missing or wrong:
        what = "; ".join([*(f"{name} is missing" for name in missing), *wrong])
        return failed("packages", what, _REINSTALL)
    return passed("packages", f"paceline {facts.paceline}, {len(facts.packages)} packages in the declared ranges")


def _is_within(version: str, declared: str) -> bool:
    """Whether a version is in a range of lower and upper bounds. Unknown bounds are ignored."""
    ours = _numbers(version)
    for sign, bound in re.findall(r"(>=|<=|==|<|>)\s*([\w.]+)", declared):
        theirs = _numbers(bound)
        width = max(len(ours), len(theirs))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (ours, theirs))
        holds = {">=": left >= right, "<=": left <= right, "==": left == right, "<": left < right, ">": left > right}
        if not holds[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_torch(facts: Torch) -> DoctorFinding:
    if facts.error:
        remedy = (
            "python -c 'import torch' shows the full error; reinstall torch: https://pytorch.org/get-started/locally"
        )
        return failed("torch", f"torch cannot be loaded: {facts.error}", remedy)
    if not facts.has_gloo:
        return failed("torch", f"{facts.version} was built without gloo", "a torch from PyPI or pytorch.org has it")
    build = f"built for CUDA {facts.cuda_build}, NCCL {facts.nccl or 'none'}" if facts.cuda_build else "a CPU build"
    return passed("torch", f"{facts.version}, {build}, CPU kernels for {facts.cpu_capability}")


def check_devices(facts: Torch, device: str, processes: int) -> DoctorFinding:
    """Compares the GPUs with the request. `processes` is 0 if the number of ranks follows from the GPUs."""
    if facts.error:
        return failed("devices", "unknown without torch", "first repair torch")
    if device == "cpu":
        return passed("devices", "the CPU, as requested")
    count = len(facts.devices)
    if count == 0:
        return _no_gpu(facts, device)
    old = [gpu["name"] for gpu in facts.devices if not _is_built_for(gpu["capability"], facts.architectures)]
    if old:
        remedy = "a torch built for this GPU: https://pytorch.org/get-started/locally, or --device cpu"
        return failed("devices", f"this torch has no code for {old[0]}", remedy)
    if processes > count:
        what = f"{processes} ranks, but {count} GPU{'s' if count > 1 else ''}"
        return failed("devices", what, f"--processes {count}, or --device cpu")
    if not facts.has_nccl:
        return failed("devices", f"{facts.version} was built without NCCL", "a torch from PyPI or pytorch.org has it")
    names = ", ".join(dict.fromkeys(gpu["name"] for gpu in facts.devices))
    about = f"{count} x {names}, {facts.devices[0]['total_bytes'] / _GIGABYTE:.0f} GB, driver {facts.driver or '?'}"
    used = [gpu for gpu in facts.devices if gpu["free_bytes"] < _MOSTLY_FREE * gpu["total_bytes"]]
    if used:
        who = f": {facts.busy[0]}" if facts.busy else ""
        what = f"{about}; {len(used)} of them already in use{who}"
        return warned("devices", what, "nvidia-smi shows the processes; end a leftover process with kill PID")
    return passed("devices", about)


def _no_gpu(facts: Torch, device: str) -> DoctorFinding:
    if facts.driver_gpus and facts.cuda_build is None:
        what = f"the driver shows {facts.driver_gpus} GPUs, but torch {facts.version} is a CPU build"
        remedy = "a CUDA build of torch: https://pytorch.org/get-started/locally"
    elif facts.cuda_error and facts.driver_gpus:
        what = f"torch for CUDA {facts.cuda_build} does not work with driver {facts.driver}: {facts.cuda_error}"
        remedy = "a newer driver, or a torch built for an older CUDA"
    elif device == "cuda":
        what = f"a GPU is requested, but there is none here{_why(facts)}"
        remedy = "--device cpu; or nvidia-smi, CUDA_VISIBLE_DEVICES, and in a job --gpus-per-node or --gres=gpu:N"
    else:
        return passed("devices", "no GPU: training runs on the CPU")
    return failed("devices", what, remedy) if device == "cuda" else warned("devices", what, remedy)


def _why(facts: Torch) -> str:
    if facts.cuda_build is None:
        return f" (torch {facts.version} is a CPU build, and there is no driver)"
    return f" ({facts.cuda_error})" if facts.cuda_error else ""


def _is_built_for(capability: str, architectures: tuple[str, ...]) -> bool:
    """Binary code runs if its major version is equal and it is not newer. PTX of any earlier version runs, too."""
    if not architectures:
        return True
    for name in architectures:
        kind, _, number = name.partition("_")
        built = re.sub(r"\D", "", number)
        if kind == "sm" and built[:-1] == capability[:-1] and int(built) <= int(capability):
            return True
        if kind == "compute" and int(built) <= int(capability):
            return True
    return False
