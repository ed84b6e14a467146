"""Kills at random moments, and the cost of the guards. benchmarks/soak.py mixes all faults.

    python benchmarks/reliability.py kills --runs 100     kill -9 of a random rank at a random moment, in each run
    python benchmarks/reliability.py guards               the guards' share of a step

Every disturbed run must end with the weights of the undisturbed one, bit for bit. Linux only: processes are found
through /proc. Prints a table; `--output FILE` also writes it, with machine, versions and date.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

WORK = ["shapes-cnn", "--global-batch-size=64", "--log-frequency=1", "--track", "--processes=2", "--output-dir=run"]
SMALL = [*WORK, "--num-samples=1480", "--epochs=2", "--save-steps=5"]  # forty steps
_STEP = re.compile(r"^step (\d+)/(\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "guards"])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.what == "kills":
        lines, is_good = measure_kills(options.runs, options.seed)
    else:
        lines, is_good = measure_guards()
    command = f"python benchmarks/reliability.py {' '.join(sys.argv[1:])}"
    text = "\n".join([*lines, "", f"{describe_machine()}. `{command}`"]) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text)
    return 0 if is_good else 1


def describe_machine() -> str:
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores ({cpu}), {versions}, {datetime.now():%Y-%m-%d}"


# --- A run from outside -----------------------------------------------------------------------------------------------


@dataclass
class Disturbed:
    """A run with injected faults: its process, and its output so far with the time of each line."""

    folder: Path
    flags: list[str]
    process: subprocess.Popen[str] = field(init=False)
    lines: list[tuple[float, str]] = field(default_factory=list)

    def start(self, *extra: str) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "train", *self.flags, *extra],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)

    def listen(self, seconds: float) -> None:
        """Read the output for some time, or until the run ends."""
        until = time.monotonic() + seconds
        assert self.process.stdout is not None
        while time.monotonic() < until:
            line = self.process.stdout.readline()
            if line:
                self.lines.append((time.monotonic(), line))
            elif self.process.poll() is not None:
                return
            else:
                time.sleep(0.002)

    def ranks(self) -> list[int]:
        children = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
        servers = children.get(self.process.pid, [])
        return sorted(pid for server in servers for pid in children.get(server, []))

    def result(self) -> str:
        return json.loads((self.folder / "run" / "results.json").read_text())["weights_sha256"]

    def next_step_after(self, moment: float) -> float | None:
        """Seconds from a given time to the first step of a later attempt."""
        restarted = next((at for at, line in self.lines if at > moment and line.startswith("paceline ")), None)
        if restarted is None:
            return None
        return next((at - moment for at, line in self.lines if at > restarted and _STEP.match(line)), None)


def run_undisturbed(flags: list[str]) -> tuple[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = Disturbed(Path(folder), flags)
        run.start()
        while run.process.poll() is None:
            run.listen(1.0)
        run.listen(0.1)
        assert run.process.returncode == 0, "".join(line for _, line in run.lines)
        steps = [at for at, line in run.lines if _STEP.match(line)]
        return run.result(), run.lines[-1][0] - steps[0]


# --- A hundred kills --------------------------------------------------------------------------------------------------


def measure_kills(runs: int, seed: int) -> tuple[list[str], bool]:
    draw = random.Random(seed)
    expected, seconds = run_undisturbed(SMALL)
    good, recoveries, places = 0, [], {}
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            run = Disturbed(Path(folder), SMALL)
            run.start()
            while len(run.ranks()) < 2 and run.process.poll() is None:
                run.listen(0.01)
            run.listen(draw.uniform(0, seconds + 1.5))
            victims = run.ranks()
            killed_at = None
            if victims:
                killed_at = time.monotonic()
                os.kill(draw.choice(victims), signal.SIGKILL)
            while run.process.poll() is None:
                run.listen(0.5)
            run.listen(0.1)
            is_right = run.process.returncode == 0 and run.result() == expected
            good += is_right
            failure = Path(folder) / "run" / "failure.json"
            phase = json.loads(failure.read_text())["phase"] if failure.exists() else "after its work was done"
            places[phase] = places.get(phase, 0) + 1
            recovery = run.next_step_after(killed_at) if killed_at else None
            if recovery is not None:
                recoveries.append(recovery)
            if not is_right:
                print(f"run {number}: exit code {run.process.returncode}\n" + "".join(line for _, line in run.lines))
    where = ", ".join(f"{name} {count}" for name, count in sorted(places.items(), key=lambda item: -item[1]))
    lines = [
        "| runs | finished with the right weights | kill to next step, median | p95 | max |",
        "|---|---|---|---|---|",
        f"| {runs} | {good} | {statistics.median(recoveries):.2f} s | {quantile(recoveries, 0.95):.2f} s "
        f"| {max(recoveries):.2f} s |",
        "",
        f"The rank that was killed was in: {where}.",
    ]
    return lines, good == runs


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# --- The cost of the guards -------------------------------------------------------------------------------------------


def measure_guards() -> tuple[list[str], bool]:
    """One rank, one model: alternate steps with and without the guards, and return the median of each."""
    from guard_cost import measure

    return measure()


if __name__ == "__main__":
    sys.exit(main())
