"""The limits of this machine: memory copies, which are measured, and links, as the system reports them."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.metrics.timing import repeat
from paceline.runtime.detect import World

_COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}  # larger than any cache
_COPY_S = 0.4


@dataclass(frozen=True)
class MachineLimits:
    """The limits of one rank while all ranks measure."""

    copy_bytes_per_s: float
    link: Limit | None  # None if nothing is exchanged


def measure_copy_bandwidth(device: str) -> float:
    """Bytes per second of a copy within the device's memory."""
    kind = torch.device(device).type
    source = torch.ones(_COPY_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rounds = repeat(lambda: target.copy_(source), device, _COPY_S)
    return source.nbytes / rounds.median_s


def find_link(world: World, copy_bytes_per_s: float) -> Limit | None:
    """The limit of the exchange between these ranks, if it is known."""
    if world.world_size == 1:
        return None
    if world.num_nodes > 1:
        return network_link(is_nccl=world.backend == "nccl")
    if world.backend == "nccl":
        return gpu_link(torch.cuda.current_device())
    ranks = f"{world.world_size} ranks at once"
    return Limit(copy_bytes_per_s, f"memory copy on this machine, {ranks}, measured in this run", is_measured=True)


_NVLINK = re.compile(r"Link \d+: ([\d.]+) GB/s")
# Gigabytes per second of one lane and direction, by generation, after encoding.
_PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_INTERFACE_VARIABLES = {True: "NCCL_SOCKET_IFNAME", False: "GLOO_SOCKET_IFNAME"}


@dataclass(frozen=True)
class Limit:
    """Bytes per second in one direction; None if unknown."""

    bytes_per_s: float | None
    name: str
    is_measured: bool = False


def gpu_link(index: int) -> Limit:
    """The link between the GPUs of this machine: NVLink if there is one, otherwise PCIe."""
    # nvidia-smi counts all GPUs of the machine, also those hidden from this process.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) and visible[index].strip() else str(index)
    nvlink = read_nvlink(_ask("nvidia-smi", "nvlink", "--status", "-i", name))
    if nvlink is not None:
        return nvlink
    query = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"
    pcie = read_pcie(_ask("nvidia-smi", query, "--format=csv,noheader,nounits", "-i", name))
    return pcie or Limit(None, "unknown: nvidia-smi reports neither NVLink nor PCIe")


def read_nvlink(text: str) -> Limit | None:
    """From `nvidia-smi nvlink --status`: the sum over the links that are up."""
    speeds = [float(speed) for speed in _NVLINK.findall(text)]
    return Limit(sum(speeds) * 1e9, f"NVLink, {len(speeds)} links, nominal") if speeds else None


def read_pcie(text: str) -> Limit | None:
    """From `nvidia-smi --query-gpu=pcie.link.gen.max,pcie.link.width.max`: generation, width."""
    match = re.match(r"\s*(\d+)\s*,\s*(\d+)\s*$", text)
    if match is None or int(match[1]) not in _PCIE_LANE:
        return None
    generation, width = int(match[1]), int(match[2])
    return Limit(_PCIE_LANE[generation] * width * 1e9, f"PCIe {generation}.0 x{width}, nominal")


def network_link(*, is_nccl: bool, net: Path = _NET, infiniband: Path = _INFINIBAND) -> Limit:
    """The link between nodes: InfiniBand with NCCL, otherwise the fastest interface that is up and has a speed."""
    rates = _infiniband_rates(infiniband) if is_nccl else {}
    if rates:
        name, gigabits = max(rates.items(), key=lambda item: item[1])
        return Limit(gigabits / 8 * 1e9, f"InfiniBand {name}, {gigabits:g} Gbit/s, nominal")
    chosen = os.environ.get(_INTERFACE_VARIABLES[is_nccl], "")
    speeds = {name: speed for name, speed in _interface_speeds(net).items() if name.startswith(chosen.lstrip("="))}
    if not speeds:
        return Limit(None, f"unknown: no network interface here reports its speed ({net}/*/speed)")
    name, megabits = max(speeds.items(), key=lambda item: item[1])
    return Limit(megabits / 8 * 1e6, f"network interface {name}, {megabits / 1000:g} Gbit/s, nominal")


def _interface_speeds(net: Path) -> dict[str, int]:
    """Megabits per second of each interface that is up. Virtual interfaces often report none."""
    found = {}
    for folder in sorted(net.glob("*")):
        try:
            state, speed = ((folder / name).read_text().strip() for name in ("operstate", "speed"))
        except OSError:  # raised by the kernel for an interface without a speed
            continue
        if folder.name != "lo" and state == "up" and speed.isdecimal() and int(speed) > 0:
            found[folder.name] = int(speed)
    return found


def _infiniband_rates(infiniband: Path) -> dict[str, float]:
    found = {}
    for port in sorted(infiniband.glob("*/ports/*")):
        try:
            state, rate = ((port / name).read_text() for name in ("state", "rate"))
        except OSError:
            continue
        match = re.match(r"([\d.]+) Gb/sec", rate)
        if "ACTIVE" in state and match:
            found[port.parent.parent.name] = float(match[1])
    return found


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
