"""How a run survives: kills at random moments, a soak of random faults, and what the guards cost.

    python benchmarks/reliability.py kills --runs 100     kill -9 of a random rank at a random moment, run after run
    python benchmarks/reliability.py soak --minutes 10    a random fault every 8 to 15 s while one run goes on
    python benchmarks/reliability.py guards               the guards' share of a step, measured side by side

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
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from paceline.runs.process_handle import ProcessHandle

WORK = ["shapes-cnn", "--global-batch-size=64", "--log-frequency=1", "--track", "--processes=2", "--output-dir=run"]
SMALL = [*WORK, "--num-samples=1480", "--epochs=2", "--save-steps=5"]  # forty steps
HANG_S = 4
SUSPENDED_S = 1.5 * HANG_S
_STEP = re.compile(r"^step (\d+)/(\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "soak", "guards"])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.what == "kills":
        lines, is_good = measure_kills(options.runs, options.seed)
    elif options.what == "soak":
        lines, is_good = measure_soak(options.minutes, options.seed)
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
    """A training under attack: its process, and what it has printed so far with the time of each line."""

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
        """Take in what it prints for a while, or until it ends."""
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
        """Seconds from a moment to the first step of a later attempt."""
        restarted = next((at for at, line in self.lines if at > moment and line.startswith("paceline ")), None)
        if restarted is None:
            return None
        return next((at - moment for at, line in self.lines if at > restarted and _STEP.match(line)), None)


def ride_undisturbed(flags: list[str]) -> tuple[str, float]:
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
    expected, seconds = ride_undisturbed(SMALL)
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


# --- The soak ---------------------------------------------------------------------------------------------------------

FAULTS = {
    "kill -9 of a rank": "kill",
    "SIGTERM to the launcher, then started again": "stop",
    "kill -9 of everything, then started again": "crash",
    "a rank is suspended (SIGSTOP, then SIGCONT)": "suspend",
    "kill -9 of the launcher, then started again": "orphan",
}


def measure_soak(minutes: float, seed: int) -> tuple[list[str], bool]:
    draw = random.Random(seed)
    epochs = max(1, round(minutes * 60 * 0.55 / 4.5))
    # Few samples: making them anew would be most of what a restart takes.
    flags = [*WORK, "--num-samples=7120", f"--epochs={epochs}", "--save-steps=25", f"--hang-timeout={HANG_S}"]
    flags += ["--max-restarts=1000", "--resume=auto"]
    print(f"undisturbed first: {epochs} epochs of 100 steps", flush=True)
    expected, needed_s = ride_undisturbed(flags)
    print(f"undisturbed: {needed_s:.0f} s; now with faults", flush=True)
    recoveries: dict[str, list[float]] = {name: [] for name in FAULTS}
    struck = dict.fromkeys(FAULTS, 0)
    with tempfile.TemporaryDirectory() as folder:
        run = Disturbed(Path(folder), flags)
        began = time.monotonic()
        run.start()
        while True:
            run.listen(draw.uniform(8, 15))
            if run.process.poll() is not None:
                break
            name = draw.choice(list(FAULTS))
            moment = time.monotonic()
            if not strike(FAULTS[name], run, draw):
                continue
            struck[name] += 1
            if FAULTS[name] in ("stop", "crash", "orphan"):
                run.start()
            while run.next_step_after(moment) is None and run.process.poll() is None:
                run.listen(0.05)
            recovery = run.next_step_after(moment)
            if recovery is not None:
                recoveries[name].append(recovery)
        wall_s = time.monotonic() - began
        is_right = run.process.returncode == 0 and run.result() == expected
        if run.process.returncode:
            print("".join(line for _, line in run.lines[-40:]))
    everything = [value for values in recoveries.values() for value in values]
    lines = ["| fault | injected | next step after, p50 | p95 |", "|---|---|---|---|"]
    for name, values in [*recoveries.items(), ("all", everything)]:
        times = f"{statistics.median(values):.2f} s | {quantile(values, 0.95):.2f} s" if values else "- | -"
        lines.append(f"| {name} | {struck.get(name, sum(struck.values()))} | {times} |")
    lines += [
        "",
        f"{sum(struck.values())} faults in {wall_s:.0f} s; undisturbed the same steps take {needed_s:.0f} s: goodput "
        f"{needed_s / wall_s:.2f}. The final weights {'equal' if is_right else 'DIFFER FROM'} the undisturbed run's, "
        "bit for bit.",
        f"A suspended rank is stopped for {SUSPENDED_S:g} s (--hang-timeout is {HANG_S} s), which its times include.",
    ]
    return lines, is_right


def strike(kind: str, run: Disturbed, draw: random.Random) -> bool:
    """Do it; False when there was nothing to do it to."""
    ranks = run.ranks()
    if len(ranks) < 2 or run.process.poll() is not None:
        return False
    if kind == "kill":
        os.kill(draw.choice(ranks), signal.SIGKILL)
    elif kind == "suspend":
        rank = ProcessHandle(draw.choice(ranks))
        rank.send(signal.SIGSTOP)
        threading.Timer(SUSPENDED_S, rank.send, (signal.SIGCONT,)).start()
    elif kind == "stop":
        run.process.terminate()
        wait_for_end(run)
    elif kind == "orphan":
        run.process.kill()
        wait_for_end(run)
        while any(is_alive(pid) for pid in ranks):  # they save and leave by themselves
            time.sleep(0.01)
    else:
        os.killpg(run.process.pid, signal.SIGKILL)
        wait_for_end(run)
    return True


def wait_for_end(run: Disturbed) -> None:
    while run.process.poll() is None:
        run.listen(0.05)


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- What the guards cost ---------------------------------------------------------------------------------------------


def measure_guards() -> tuple[list[str], bool]:
    """One rank, one model, steps with and without the guards in turn; the median of each."""
    from guard_cost import measure

    return measure()


if __name__ == "__main__":
    sys.exit(main())
