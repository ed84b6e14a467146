"""Checks of Python, packages, torch and its GPUs."""

from __future__ import annotations

import re

from paceline.tools.doctor.findings import Finding, failed, passed, skipped, warned
from paceline.tools.doctor.gather.software import Software, Torch

_GIGABYTE = 10**9
_MOSTLY_FREE = 0.9  # fraction of a GPU's memory that is free if no other process uses it
_REINSTALL = "python -m pip install --upgrade paceline, in the environment you train in"


def check_python(facts: Software) -> Finding:
    if not _is_within(facts.python, facts.needs_python):
        return failed("python", f"{facts.python}, but {facts.needs_python} is needed", "a virtual environment with it")
    return passed("python", f"{facts.python} on {facts.platform}")


def check_packages(facts: Software) -> Finding:
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


def check_torch(facts: Torch) -> Finding:
    if facts.error:
        remedy = (
            "python -c 'import torch' shows the full error; reinstall torch: https://pytorch.org/get-started/locally"
        )
        return failed("torch", f"torch cannot be loaded: {facts.error}", remedy)
    if not facts.has_gloo:
        return failed("torch", f"{facts.version} was built without gloo", "a torch from PyPI or pytorch.org has it")
    build = f"built for CUDA {facts.cuda_build}, NCCL {facts.nccl or 'none'}" if facts.cuda_build else "a CPU build"
    return passed("torch", f"{facts.version}, {build}, CPU kernels for {facts.cpu_capability}")


def check_devices(facts: Torch, device: str, processes: int) -> Finding:
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


def _no_gpu(facts: Torch, device: str) -> Finding:
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
