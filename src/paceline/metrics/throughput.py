"""How fast, and how much of the time stood waiting for data. Durations are monotonic."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Stopwatch:
    """Counts samples and waiting since it was last read."""

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
    """Of the GPU this rank uses, or of the process on a CPU."""
    if device.startswith("cuda"):
        return Memory(torch.cuda.memory_allocated(device) / 2**20, torch.cuda.max_memory_allocated(device) / 2**20)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes there and kilobytes elsewhere
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return Memory(peak, peak)
    now = int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
    return Memory(now, max(now, peak))
