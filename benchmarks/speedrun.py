"""CIFAR-10 training time: many seeds of one recipe, and the time from the shell prompt to the result.

    python benchmarks/speedrun.py --data-dir data --seeds 30 --output benchmarks/results/speedrun-DATE.md
    python benchmarks/speedrun.py --recipe cifar10-96 --seeds 3 --no-shell

Seeds run one after the other in this process. Each is a complete run with metrics, checkpoints and guards. Two clocks,
both without compilation: from the first step to the last, and with the set-up from the data (whitening) and the final
test, as airbench and the published records count. The shell time is the time of `paceline train` in a
new process until it prints its test accuracy: cold (no compiled code in the cache), then warm.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from paceline.metrics.ceiling import count_flops
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.runtime.detect import ALONE, build_world
from paceline.settings.load import load_config
from paceline.training.loop import train


def run_seed(recipe: str, flags: list[str], seed: int, folder: Path) -> dict[str, float]:
    config = load_config(recipe, [*flags, f"--seed={seed}", "--processes=1"]).config
    world = build_world(config.parallel, ALONE)
    RunFolder(folder).create()
    with contextlib.redirect_stdout(io.StringIO()):
        results = train(config, world, RunPlace(folder, None, False)).to_json()
    # Count FLOPs here: in a run of seconds it would take too long.
    flops = count_flops(config.model, (3, 32, 32), 10).per_sample or float("nan")
    return {
        "accuracy": results["test_accuracy"],
        "seconds": results["clocks"]["first_to_last_step_seconds"],
        "published_seconds": results["clocks"]["set_up_steps_and_test_seconds"],
        "saved_seconds": results["training_seconds"],
        "tflop": flops * results["samples_seen"] / 1e12,
    }


def time_from_shell(recipe: str, flags: list[str], cache: str) -> tuple[float, str]:
    """Seconds until `paceline train` prints its test accuracy, and that line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "train", recipe, *flags, f"--output-dir={folder}/run"]
        began = time.perf_counter()
        surroundings = {**os.environ, "PACELINE_CACHE": cache, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("test accuracy"):
                    seconds = time.perf_counter() - began
                    process.stdout.read()
                    return seconds, line.strip()
    sys.exit(f"{' '.join(command)} printed no accuracy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="cifar10-speedrun")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--no-shell", action="store_true")
    parser.add_argument("--output")
    given, more = parser.parse_known_args()
    flags = [f"--data-dir={given.data_dir}", *more]
    lines = [
        f"# {given.recipe}",
        "",
        f"{torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()}, torch"
        f" {torch.__version__}, Python {platform.python_version()}, {date.today().isoformat()}.",
        "",
        f"    python {' '.join(sys.argv)}",
        "",
    ]
    with tempfile.TemporaryDirectory() as work:
        if not given.no_shell:
            for state in ("cold", "warm", "warm again"):
                seconds, line = time_from_shell(given.recipe, flags, f"{work}/cache")
                lines.append(f"- from the shell, {state}: {seconds:.1f} s until `{line}`")
                print(lines[-1], flush=True)
        os.environ["PACELINE_CACHE"] = f"{work}/cache"
        runs = []
        for seed in range(given.seeds):
            runs.append(run_seed(given.recipe, flags, seed, Path(work) / f"seed-{seed}"))
            print(f"seed {seed}: {runs[-1]['accuracy']:.2%} in {runs[-1]['seconds']:.3f} s", flush=True)
    accuracies, seconds = [run["accuracy"] for run in runs], sorted(run["seconds"] for run in runs)
    saved = [run["saved_seconds"] for run in runs]
    published = sorted(run["published_seconds"] for run in runs)
    lines += [
        f"- accuracy over {len(runs)} seeds: mean {statistics.fmean(accuracies):.3%},"
        f" standard deviation {statistics.stdev(accuracies) if len(runs) > 1 else 0:.3%},"
        f" {min(accuracies):.2%} to {max(accuracies):.2%}",
        f"- set-up, steps and test (the clock of published records): median {statistics.median(published):.3f} s,"
        f" {published[0]:.3f} to {published[-1]:.3f} s",
        f"- first to last step: median {statistics.median(seconds):.3f} s, {seconds[0]:.3f} to {seconds[-1]:.3f} s;"
        f" until the last checkpoint is on disk and verified: median {statistics.median(saved):.3f} s",
        f"- arithmetic: {runs[0]['tflop']:,.0f} TFLOP in a run",
        "",
    ]
    print("\n".join(lines))
    if given.output:
        Path(given.output).write_text("\n".join(lines))


if __name__ == "__main__":
    main()
