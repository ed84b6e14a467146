"""Seconds from `paceline.train` to the end of the first step: the first call of a process, and later ones.

    python benchmarks/warm_start.py         # a small CNN on generated pictures, on one rank

The first call loads torch. Later calls are forked from the process that it leaves (src/paceline/launch/warm.py).
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

import paceline

CALLS = 6


def seconds_to_first_step(folder: Path) -> float:
    began = time.time()
    run = paceline.train(
        "shapes-cnn",
        epochs=1,
        num_samples=640,
        global_batch_size=64,
        processes=1,
        log_frequency=1,
        quiet=True,
        output_dir=folder,
    )
    return float(run.metrics("step")[0]["time"] - began)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, *later = [seconds_to_first_step(Path(folder) / str(number)) for number in range(CALLS)]
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"first call  {first:.2f} s")
    print(
        f"later calls {statistics.median(later):.2f} s (from {min(later):.2f} to {max(later):.2f}, {len(later)} calls)"
    )


if __name__ == "__main__":
    main()
