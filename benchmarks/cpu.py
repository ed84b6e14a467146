"""Compare Paceline with plain DDP, Lightning and Accelerate on two CPU ranks, in interleaved rounds.

    make bench-cpu                                        # in .venv-bench, about seven minutes
    python benchmarks/cpu.py [--rounds 5] [--output benchmarks/results] [--quick]

Paceline is measured as the command `paceline train` with supervisor, guards, metrics and checkpoints. Its speed is
measured from outside, by the times of its log lines, and compared with its results.json. The other trainers record the
end of each step (cpu_ranks.py). Warm-up steps and evaluation are not counted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from cpu_ranks import WORKS, Work

RANKS = Path(__file__).with_name("cpu_ranks.py")
LOG_EVERY = 10
TITLES = {
    "paceline": "**Paceline**, `paceline train`, measured from outside",
    "same-means": "a bare loop with the same means",
    "by-hand": "DataLoader + DDP by hand",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "seed": "seed-style loop (DataLoader + DDP, metrics read every step)",
}
CONTESTANTS = {
    "cnn": ("paceline", "same-means", "by-hand", "lightning", "accelerate"),
    "mlp": ("paceline", "same-means", "seed"),
}
PEERS = {"cnn": ("by-hand", "lightning", "accelerate"), "mlp": ("seed",)}
HEADINGS = {
    "cnn": "The course's CNN, 3x32x32, global batch 256 (images/s)",
    "mlp": "The Runnable seed's MLP, 784-256-128-10, 64 per rank (samples/s)",
}
TARGETS = {"cnn": 1.4, "mlp": 1.7}
MOST_SLOWER = 0.03  # compared with the bare loop
SIZES = (10_000, 100_000, 1_000_000)


def environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "RANK", "WORLD"))}
    return {**clean, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}


def flags_of(work: Work) -> list[str]:
    size = 2 * work.rank_batch
    common = ["--processes=2", "--augment=none", f"--global-batch-size={size}", f"--log-frequency={LOG_EVERY}"]
    data = ["--dataset=synthetic", f"--input-size={work.shape}", f"--num-samples={work.samples}", "--train-split=0.9"]
    return [*common, *data, "--epochs=100", "--track"]


@dataclass(frozen=True)
class RunTimes:
    """The times of one `paceline train`."""

    steps_per_s: float  # measured from outside, between two log lines
    step_cpu_s: float  # of all its processes, between the same lines
    own_steps_per_s: float  # from results.json: all steps after the first ten
    median_step_ms: float  # of the same steps
    rank_mb: float  # private memory of one rank


def time_run(
    recipe: str, flags: list[str], folder: Path, steps: int, warmup: int, python: str = sys.executable
) -> RunTimes:
    command = [python, "-m", "paceline", "train", recipe, *flags, f"--max-steps={steps}", "--output-dir=run"]
    seen: list[tuple[int, float, float]] = []
    memory_mb = 0.0
    with (
        (folder / "errors").open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(), cwd=folder
        ) as run,
    ):
        assert run.stdout is not None
        for line in run.stdout:
            if not (found := re.match(r"step (\d+)/", line)):
                continue
            if not memory_mb and int(found[1]) >= warmup - LOG_EVERY:  # before the clock starts
                memory_mb = max(map(own_memory_mb, processes_in(folder)))
            step, now = int(found[1]), time.perf_counter()
            if (step >= warmup and not seen) or step == steps:  # reading /proc of all processes slows the ranks down
                seen.append((step, now, sum(map(cpu_seconds, processes_in(folder)))))
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{(folder / 'errors').read_text()}")
    results = json.loads((folder / "run" / "results.json").read_text())
    (first, began, cpu_before), (last, ended, cpu_after) = seen
    steps_seen = last - first
    own_step_ms = statistics.fmean(entry["step_ms"]["mean"] for entry in results["process_metrics"])
    cpu_s = (cpu_after - cpu_before) / steps_seen
    median_step_ms = statistics.fmean(entry["step_ms"]["p50"] for entry in results["process_metrics"])
    return RunTimes(steps_seen / (ended - began), cpu_s, 1000 / own_step_ms, median_step_ms, memory_mb)


def processes_in(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder.resolve():
                found.append(int(entry.name))
        except OSError:  # the process has ended
            continue
    return found


def cpu_seconds(pid: int) -> float:
    try:
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_memory_mb(pid: int) -> float:
    """Anonymous memory, without shared memory and mapped files."""
    try:
        lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)


def time_ranks(kind: str, name: str, folder: Path, steps: int, warmup: int) -> tuple[float, float]:
    """Steps per second, and CPU seconds of both ranks per step."""
    answer = folder / "answer.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(RANKS), kind, name, str(answer), f"--steps={steps}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if not answer.exists():  # an error of lightning after the last step is ignored
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    moments = json.loads(answer.read_text())
    (began, cpu_before), (ended, cpu_after) = moments[warmup], moments[-1]
    counted = len(moments) - 1 - warmup
    return counted / (ended - began), 2 * (cpu_after - cpu_before) / counted


def compare(name: str, rounds: int, steps: int) -> list[str]:
    """Run every trainer once per round, and return the table."""
    work = WORKS[name]
    batch = 2 * work.rank_batch
    rates: dict[str, list[float]] = {kind: [] for kind in CONTESTANTS[name]}
    costs: dict[str, list[float]] = {kind: [] for kind in CONTESTANTS[name]}
    own: list[float] = []
    for number in range(rounds):
        for kind in CONTESTANTS[name]:
            with tempfile.TemporaryDirectory() as text:
                folder = Path(text)
                if kind == "paceline":
                    recipe = "cifar10-cnn" if name == "cnn" else "synthetic-mlp"
                    done = time_run(recipe, flags_of(work), folder, steps, work.warmup)
                    rate, cost = done.steps_per_s, done.step_cpu_s
                    own.append(batch * done.own_steps_per_s)
                else:
                    rate, cost = time_ranks(kind, name, folder, steps, work.warmup)
            rates[kind].append(batch * rate)
            costs[kind].append(1e6 * cost / batch)
            speed, cpu = f"{batch * rate:10,.0f} samples/s", f"{costs[kind][-1]:8,.0f} us of CPU each"
            print(f"round {number + 1}/{rounds}  {name}  {kind:12} {speed} {cpu}", flush=True)
    return table(name, rates, costs, own)


def table(name: str, rates: dict[str, list[float]], costs: dict[str, list[float]], own: list[float]) -> list[str]:
    best = max(PEERS[name], key=lambda kind: statistics.median(rates[kind]))
    ours = statistics.median(rates["paceline"])
    lines = [
        f"## {HEADINGS[name]}",
        "",
        "| | median | lowest | highest | against the best peer, round by round | CPU time per sample, median |",
        "|---|---|---|---|---|---|",
    ]
    for kind in CONTESTANTS[name]:
        values = rates[kind]
        ratio = statistics.median(mine / other for mine, other in zip(values, rates[best], strict=True))
        figures = f"{statistics.median(values):,.0f} | {min(values):,.0f} | {max(values):,.0f}"
        lines.append(f"| {TITLES[kind]} | {figures} | {ratio:.2f}x | {statistics.median(costs[kind]):,.0f} us |")
    against = statistics.median(mine / other for mine, other in zip(rates["paceline"], rates[best], strict=True))
    slower = 1 - statistics.median(
        mine / other for mine, other in zip(rates["paceline"], rates["same-means"], strict=True)
    )
    own_share = statistics.median(own) / ours - 1
    return [
        *lines,
        "",
        f"Paceline against {TITLES[best]}: **{against:.2f}x** (wanted: {TARGETS[name]}x:"
        f" {'reached' if against >= TARGETS[name] else 'not reached'}). Against the bare loop: {slower:+.1%} slower"
        f" (wanted: at most {MOST_SLOWER:.0%}: {'reached' if slower <= MOST_SLOWER else 'not reached'}). The run's own"
        f" results.json differs by {own_share:+.1%} from the outside measurement. CPU time is the sum over all"
        " processes and threads; on a busy machine it is more reliable than the clock.",
        "",
    ]


def measure_sizes(rounds: int, steps: int) -> list[str]:
    """The same steps on larger and larger data sets, without checkpoints, which short epochs would have more often."""
    rates: dict[int, list[float]] = {size: [] for size in SIZES}
    step_ms: dict[int, list[float]] = {size: [] for size in SIZES}
    cpu_ms: dict[int, list[float]] = {size: [] for size in SIZES}
    memory_mb: dict[int, float] = {}
    shape = ["--processes=2", "--global-batch-size=128", f"--log-frequency={LOG_EVERY}", "--track", "--epochs=1000"]
    shape += ["--train-split=1", "--save-epochs=1000"]
    for number in range(rounds):
        for size in SIZES:
            flags = ["--dataset=synthetic", "--input-size=64", f"--num-samples={size}", "--augment=none", *shape]
            with tempfile.TemporaryDirectory() as folder:
                done = time_run("synthetic-mlp", flags, Path(folder), steps, 2 * LOG_EVERY)
            # From results.json, because the smallest data set has many epoch ends.
            rates[size].append(128 * done.own_steps_per_s)
            step_ms[size].append(done.median_step_ms)
            cpu_ms[size].append(1000 * done.step_cpu_s)
            memory_mb[size] = done.rank_mb
            print(f"round {number + 1}/{rounds}  {size:9,} samples  {rates[size][-1]:10,.0f} samples/s", flush=True)
    lines = [
        "## More samples behind the same steps (MLP on vectors of 64 numbers, 64 per rank)",
        "",
        "| samples | samples/s, median | lowest | highest | a step | its CPU time | data, once per node"
        " | a rank's own memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        values, data_mb = rates[size], 1.1 * size * (64 * 4 + 8) / 2**20
        lines.append(
            f"| {size:,} | {statistics.median(values):,.0f} | {min(values):,.0f} | {max(values):,.0f} "
            f"| {statistics.median(step_ms[size]):.2f} ms | {statistics.median(cpu_ms[size]):.2f} ms "
            f"| {data_mb:,.0f} MB | {memory_mb[size]:,.0f} MB |"
        )
    clock, cpu = (_growth(values[SIZES[0]], values[SIZES[-1]]) for values in (step_ms, cpu_ms))
    lines += [
        "",
        f"A step of {SIZES[-1]:,} samples against one of {SIZES[0]:,}, round by round: {clock:+.1%} by the clock,"
        f" {cpu:+.1%} in CPU time (wanted: within 5 %). Other load on the machine changes the clock time.",
        "",
    ]
    return lines


def _growth(small: list[float], large: list[float]) -> float:
    return statistics.median(b / a for a, b in zip(small, large, strict=True)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--quick", action="store_true", help="one round of few steps, printed only")
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    began, load = time.monotonic(), os.getloadavg()[0]
    lines: list[str] = []
    for name in CONTESTANTS:
        work = WORKS[name]
        lines += compare(name, rounds, work.warmup + 20 if arguments.quick else work.steps)
    lines += measure_sizes(1 if arguments.quick else rounds, 60 if arguments.quick else 600)
    report = "\n".join([*header(rounds, load, time.monotonic() - began), *lines])
    print("\n" + report)
    if not arguments.quick:
        path = arguments.output / f"cpu-{date.today().isoformat()}.md"
        path.write_text(report)
        print(f"written to {path}")


def header(rounds: int, load: float, seconds: float) -> list[str]:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "lightning", "accelerate"))
    return [
        "# Two CPU ranks",
        "",
        f"`make bench-cpu`, {date.today().isoformat()}: {rounds} interleaved rounds, {seconds:,.0f} s. {cpu_name()},"
        f" {len(os.sched_getaffinity(0))} cores, {platform.system()}; Python {platform.python_version()}, {versions}."
        f" One thread per rank. Load before: {load:.1f} (other programs; above 0.5 use the ratios, not the values).",
        "",
        "Synthetic samples of these shapes, no augmentation, evaluation is not timed. Peers get float tensors"
        " that need no more work; Paceline and the bare loop normalise bytes at every step.",
        "",
    ]


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
