"""From `paceline.train` to the end of the first step: the first call of a process, later calls, and without the server.

    python benchmarks/warm_start.py         # a small CNN on generated pictures, on one rank

The first call loads torch. Later calls are forked from the process that it leaves (src/paceline/launch/warm.py). CPU
time is that of all processes of the call, also of the process that is kept. It hardly depends on other programs; wall
time does.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import paceline

CALLS = 5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    wall_s: float
    cpu_s: float


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        first, *later = [measure(f"warm-{number}") for number in range(CALLS + 1)]
        os.environ["PACELINE_WARM"] = "off"
        cold = [measure(f"cold-{number}") for number in range(CALLS)]
        os.chdir("/")
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    for name, costs in {"first call": [first], "later calls": later, "PACELINE_WARM=off": cold}.items():
        print(f"{name:<18} {spread([c.wall_s for c in costs])} s, CPU {spread([c.cpu_s for c in costs])} s")
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")


def measure(name: str) -> Cost:
    """One run in a new folder."""
    cpu_s: list[float] = []
    before_s, began = cpu_of_processes_here(), time.time()
    watcher = threading.Thread(target=lambda: cpu_s.append(cpu_at_first_step(Path(name)) - before_s))
    watcher.start()
    run = paceline.train(
        "shapes-cnn",
        epochs=1,
        num_samples=640,
        global_batch_size=64,
        processes=1,
        log_frequency=1,
        quiet=True,
        output_dir=name,
    )
    watcher.join()
    return Cost(run.metrics("step")[0]["time"] - began, cpu_s[0])


def cpu_at_first_step(run: Path) -> float:
    rows = run / "metrics.jsonl"
    while not (rows.exists() and rows.stat().st_size):
        time.sleep(0.02)
    return cpu_of_processes_here()


def cpu_of_processes_here() -> float:
    """CPU seconds of this process and of all others with its working folder."""
    total = 0.0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == Path.cwd():
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        except OSError:  # ended meanwhile
            continue
    return total


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
