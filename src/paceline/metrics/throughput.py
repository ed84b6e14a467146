"""Throughput and data waiting time. Durations use the monotonic clock."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field

import torch


@dataclass
class Stopwatch:
    """Counts samples and waiting time since the last reading."""

    started: float = field(default_factory=time.perf_counter)
    samples: int = 0
    wait_s: float = 0.0

    def count(self, samples: int, wait_s: float) -> None:
        self.samples += samples
        self.wait_s += wait_s

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self.started, 1e-9)

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds

    @property
    def wait_share(self) -> float:
        return min(self.wait_s / self.seconds, 1.0)

    def restart(self) -> None:
        self.started, self.samples, self.wait_s = time.perf_counter(), 0, 0.0


@dataclass(frozen=True)
class Memory:
    now_mb: float
    peak_mb: float


def read_memory(device: str) -> Memory:
    """The memory of this rank's GPU, or of the process on a CPU."""
    if device.startswith("cuda"):
        seen = torch.cuda.memory_stats(device)  # slow: call it once
        now, peak = (seen.get(f"allocated_bytes.all.{name}", 0) for name in ("current", "peak"))
        return Memory(now / 2**20, peak / 2**20)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS and in kilobytes elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    try:
        with open("/proc/self/statm", "rb", buffering=0) as statm:  # noqa: PTH123 - Path takes several times as long
            now = int(statm.read(100).split()[1]) * resource.getpagesize() / 2**20
    except FileNotFoundError:  # not Linux
        return Memory(peak, peak)
    return Memory(now, max(now, peak))


class EnergyMeter:
    """Energy that this rank's GPU has used since the meter was created; None if the driver does not report it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._before_j = self._read_j()

    @property
    def joules(self) -> float | None:
        now_j = self._read_j()
        return None if now_j is None or self._before_j is None else now_j - self._before_j

    def _read_j(self) -> float | None:
        if not self._device.startswith("cuda"):
            return None
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(self._device).uuid}")
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
        except Exception:  # no library, no permission, or an old GPU: report no value
            return None
