"""A soak: one run under a long series of random faults must end with the weights of an undisturbed run, bit for bit.

    python benchmarks/soak.py --faults 1000 [--runs 1]        (make soak FAULTS=1000)

The run has two ranks, saves every 20 steps, and uploads to a store. Its disk is a real small one (tmpfs), its terminal
a real pseudo-terminal. A fault is injected every 15 to 45 steps; one in eight soon after the previous one, while the
run still recovers. The undisturbed run trains at the same time. With --runs N, N such pairs run in parallel and share
the faults, for machines with many cores. Progress is read from the run's own files, because the terminal may be lost.
Linux only; mounting needs root or user namespaces. Prints a table; `--output FILE` also writes it, with machine,
versions and date.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import pty
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from reliability import describe_machine, quantile

STEPS_PER_EPOCH = 250
STEPS_PER_FAULT = 100  # on average, including what is trained during a fault
STEP_S = 0.01
HANG_TIMEOUT_S = 5
SUSPENDED_S = 6.0  # longer than the hang timeout
DISK_MB = 64
RECOVERY_LIMIT_S = 120.0
POLL_S = 0.02
EXIT_STOPPED = 75
IN_NAMESPACE = "SOAK_NAMESPACE"
OUTAGE = Path(__file__).parents[1] / "tests" / "faults" / "outage"  # loaded by every process of the run
SUCCESS = (
    "The final weights are equal to the undisturbed run's, bit for bit; every logged step is in metrics.jsonl once; no "
    "checkpoint was set aside as damaged; the store holds the newest checkpoint."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if IN_NAMESPACE not in os.environ:  # mounts in the namespace end with the last process of the soak
        os.environ[IN_NAMESPACE] = "1"
        os.execvp("unshare", ["unshare", "-rm", sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        shares = [options.faults // options.runs + (n < options.faults % options.runs) for n in range(options.runs)]
        with ThreadPoolExecutor(options.runs) as pool:
            soaks = [
                pool.submit(soak, Path(folder) / str(number), share, random.Random(options.seed + number))
                for number, share in enumerate(shares)
            ]
            outcomes = [done.result() for done in soaks]
    lines, is_good = describe(outcomes)
    is_good = is_good and sum(sum(outcome.counts.values()) for outcome in outcomes) == options.faults
    text = "\n".join([*lines, "", f"{describe_machine()}. `python benchmarks/soak.py {' '.join(sys.argv[1:])}`"]) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text)
    return 0 if is_good else 1


def flags_for(faults: int) -> list[str]:
    epochs = -(-(faults * STEPS_PER_FAULT + STEPS_PER_EPOCH) // STEPS_PER_EPOCH)
    return [
        *("synthetic-mlp", "--num-samples=10000", "--global-batch-size=32", f"--epochs={epochs}", "--track"),
        *(
            "--processes=2",
            "--save-steps=20",
            "--keep-last=2",
            "--log-frequency=10",
            f"--hang-timeout-s={HANG_TIMEOUT_S}",
            "--omp-num-threads=1",  # several runs share the cores
        ),
        *("--max-restarts=1000000", "--resume=auto"),
        # Sleep in each step, to simulate a larger model and leave CPU time for restarts.
        f"--inject=slow rank=* step=1 steps=1000000000 seconds={STEP_S}",
    ]


# --- The run ----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A training, its disk, its store and its terminal."""

    base: Path
    flags: list[str]
    process: subprocess.Popen[bytes] = field(init=False)
    launches: int = 0
    terminal: int | None = None  # the master side; None after the terminal was lost
    output: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base.mkdir()
        self.disk, self.store, self.switch = self.base / "disk", self.base / "store", self.base / "outage"
        self.disk.mkdir()
        self.store.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(self.disk)]
        subprocess.run(mount, check=True)
        url = f"file://{self.store}/run"
        self.folder = self.disk / "runs" / "file" / url.removeprefix("file:///")
        self.flags = [*self.flags, f"--output-dir={url}"]

    def start(self) -> None:
        self.launches += 1
        settings = {"switch": str(self.switch), "errno": errno.ETIMEDOUT, "match": f"{re.escape(str(self.disk))}/.*"}
        outage = {"PYTHONPATH": str(OUTAGE), "OUTAGE": json.dumps(settings)}
        master, terminal = pty.openpty()
        self.process = subprocess.Popen(
            # A new session on this terminal, so that closing the terminal sends SIGHUP.
            ["setsid", "-c", sys.executable, "-m", "paceline", "train", *self.flags],
            cwd=self.disk,
            env={**os.environ, **outage, "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        self.terminal = master
        threading.Thread(target=self._drain, args=(master,), daemon=True).start()

    def _drain(self, master: int) -> None:
        with suppress(OSError):
            while text := os.read(master, 65536):
                self.output = [*self.output[-200:], text]

    def close_terminal(self) -> None:
        if self.terminal is not None:
            os.close(self.terminal)
            self.terminal = None

    def status(self) -> dict[str, Any]:
        try:
            content = json.loads((self.folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def step(self) -> int:
        return int(self.status().get("step") or 0)

    def is_training_as(self, primary: int, *, other_than: bool) -> bool:
        """Whether rank 0 is this process; after a restart, another one."""
        status = self.status()
        is_training = status.get("status") == "running" and int(status.get("step") or 0) > 0
        return is_training and (status.get("pid") != primary) == other_than

    def ranks(self) -> list[int]:
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
        return sorted(pid for server in children.get(self.process.pid, []) for pid in children.get(server, []))

    def wait_until(self, condition: Callable[[], bool], limit_s: float = RECOVERY_LIMIT_S) -> bool:
        """False if the run ends first. Raises after the limit: a run without progress has failed the soak."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.is_over:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened for {limit_s:.0f} s\n{self.tail()}")
            time.sleep(POLL_S)
        return True

    def tail(self) -> str:
        return b"".join(self.output).decode(errors="replace")[-6000:] + f"\n{self.status()}"


# --- The faults -------------------------------------------------------------------------------------------------------


def kill_rank(run: Run, draw: random.Random) -> bool:
    ranks = run.ranks()
    if not ranks:
        return False
    with suppress(ProcessLookupError):
        os.kill(draw.choice(ranks), signal.SIGKILL)
    return True


def stop_and_start(run: Run, draw: random.Random) -> bool:
    run.process.terminate()
    code = run.process.wait(RECOVERY_LIMIT_S)
    if code not in (0, EXIT_STOPPED, 128 + signal.SIGTERM):
        raise AssertionError(f"SIGTERM ended the run with exit code {code}\n{run.tail()}")
    if code != 0:
        run.start()
    return True


def kill_everything(run: Run, draw: random.Random) -> bool:
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()
    run.start()
    return True


def kill_launcher(run: Run, draw: random.Random) -> bool:
    """The ranks are orphans and may still save. The run is started again at once."""
    run.process.kill()
    run.process.wait()
    run.start()
    return True


def suspend_job(run: Run, draw: random.Random) -> bool:
    os.killpg(run.process.pid, signal.SIGSTOP)
    time.sleep(SUSPENDED_S)
    os.killpg(run.process.pid, signal.SIGCONT)
    return True


def suspend_rank(run: Run, draw: random.Random) -> bool:
    ranks = run.ranks()
    if not ranks:
        return False
    victim = draw.choice(ranks)
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGSTOP)
        time.sleep(draw.uniform(0.1, 2.0))
        os.kill(victim, signal.SIGCONT)
    return True


def cut_disk(run: Run, draw: random.Random) -> bool:
    run.switch.touch()
    time.sleep(draw.uniform(0.1, 2.0))
    run.switch.unlink()
    return True


def fill_disk(run: Run, draw: random.Random) -> bool:
    filler = run.disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        for size in (2**16, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    time.sleep(draw.uniform(0.1, 1.5))
    filler.unlink()
    return True


def interrupt_store(run: Run, draw: random.Random) -> bool:
    away = run.base / "store-away"
    run.store.rename(away)
    run.store.write_text("not a folder")
    time.sleep(draw.uniform(0.1, 2.0))
    run.store.unlink()
    away.rename(run.store)
    return True


def lose_terminal(run: Run, draw: random.Random) -> bool:
    if run.terminal is None:
        return False
    run.close_terminal()
    return True


@dataclass(frozen=True)
class Fault:
    name: str
    weight: int
    inject: Callable[[Run, random.Random], bool]  # False if there was no target
    is_restart: bool  # the ranks are restarted


FAULTS = (
    Fault("kill -9 of a rank", 24, kill_rank, True),
    Fault("SIGTERM to the launcher, started again", 7, stop_and_start, True),
    Fault("kill -9 of everything, started again", 7, kill_everything, True),
    Fault("kill -9 of the launcher alone, started again at once", 7, kill_launcher, True),
    Fault(f"the whole job is suspended for {SUSPENDED_S:.0f} s", 3, suspend_job, False),
    Fault("one rank is suspended for up to 2 s", 10, suspend_rank, False),
    Fault("file operations time out for up to 2 s", 14, cut_disk, False),
    Fault("the disk is full for up to 1.5 s", 12, fill_disk, False),
    Fault("the store is away for up to 2 s", 10, interrupt_store, False),
    Fault("the terminal is closed", 6, lose_terminal, False),
)


# --- The soak ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One run under faults, and the undisturbed run at the same time."""

    recoveries_s: dict[str, list[float]]
    counts: dict[str, int]
    ended: int  # how often the run ended by itself
    wall_s: float
    undisturbed_s: float
    problems: list[str]


def soak(base: Path, faults: int, draw: random.Random) -> Outcome:
    base.mkdir()
    flags = flags_for(faults)
    reference, run = Run(base / "undisturbed", flags), Run(base / "soak", flags)
    began = time.monotonic()
    reference.start()
    run.start()
    with ThreadPoolExecutor(1) as pool:
        undisturbed = pool.submit(finish_undisturbed, reference, began)
        recoveries_s, counts, ended = inject_all(run, faults, draw)
        run.process.wait()
        wall_s = time.monotonic() - began
        undisturbed_s = undisturbed.result()
    return Outcome(recoveries_s, counts, ended, wall_s, undisturbed_s, find_problems(run, read_weights(reference)))


def finish_undisturbed(run: Run, began: float) -> float:
    if run.process.wait():
        raise AssertionError(f"the undisturbed run failed\n{run.tail()}")
    return time.monotonic() - began


def read_weights(run: Run) -> str:
    return str(json.loads((run.folder / "results.json").read_text())["weights_sha256"])


def inject_all(run: Run, faults: int, draw: random.Random) -> tuple[dict[str, list[float]], dict[str, int], int]:
    recoveries: dict[str, list[float]] = {fault.name: [] for fault in FAULTS}
    counts = dict.fromkeys(recoveries, 0)
    ended = 0
    first = draw.sample(FAULTS, len(FAULTS))  # each kind at least once
    run.wait_until(lambda: run.step > 0)
    while sum(counts.values()) < faults:
        if not is_soon(draw):
            goal = run.step + draw.randint(15, 45)
            run.wait_until(partial(has_reached, run, goal))
        else:
            time.sleep(draw.uniform(0, 3))
        if run.is_over:
            if run.process.returncode == 0:
                break  # finished: fewer faults than requested, which counts as a failure
            ended += 1
            print(f"ended by itself with {run.process.returncode}\n{run.tail()}", flush=True)
            run.start()
            run.wait_until(lambda: run.status().get("status") == "running" and run.step > 0)
            continue
        fault = first[-1] if first else draw.choices(FAULTS, weights=[fault.weight for fault in FAULTS])[0]
        primary, step, began = int(run.status().get("pid") or 0), run.step, time.monotonic()
        if not fault.inject(run, draw):
            continue
        counts[fault.name] += 1
        first = first[:-1]
        if sum(counts.values()) % 25 == 0:
            print(f"{sum(counts.values())} faults, step {run.step}", flush=True)
        if fault.is_restart:
            moved = run.wait_until(partial(run.is_training_as, primary, other_than=True))
        else:
            began = time.monotonic()  # the end of the fault
            moved = run.wait_until(partial(has_moved, run, primary, step))
        if moved:
            recoveries[fault.name].append(time.monotonic() - began)
    return recoveries, counts, ended


def has_reached(run: Run, step: int) -> bool:
    return run.step >= step


def has_moved(run: Run, primary: int, step: int) -> bool:
    return run.step > step or run.is_training_as(primary, other_than=True)


def is_soon(draw: random.Random) -> bool:
    return draw.random() < 1 / 8


def find_problems(run: Run, expected: str) -> list[str]:
    problems = []
    if run.process.returncode:
        return [f"exit code {run.process.returncode}\n{run.tail()}"]
    if read_weights(run) != expected:
        problems.append("the weights differ")
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    if steps != sorted(set(steps)):
        problems.append("a step is in metrics.jsonl twice")
    if len(steps) < max(steps) // 10:
        problems.append(f"only {len(steps)} rows for {max(steps)} steps in metrics.jsonl")
    damaged = [path.name for path in (run.folder / "checkpoints").glob("damaged-*")]
    if damaged:
        problems.append(f"set aside as damaged: {damaged}")
    newest = (run.folder / "checkpoints" / "latest").resolve()
    for file in newest.iterdir():
        stored = run.store / "run" / "checkpoints" / newest.name / file.name
        if not stored.exists() or stored.read_bytes() != file.read_bytes():
            problems.append(f"the store lacks {newest.name}/{file.name}")
    return problems


def describe(outcomes: list[Outcome]) -> tuple[list[str], bool]:
    """The table and its summary, and whether all checks passed."""
    recoveries = {
        fault.name: [value for outcome in outcomes for value in outcome.recoveries_s[fault.name]] for fault in FAULTS
    }
    counts = {fault.name: sum(outcome.counts[fault.name] for outcome in outcomes) for fault in FAULTS}
    everything = [value for values in recoveries.values() for value in values]
    lines = ["| fault | injected | next step after, p50 | p95 |", "|---|---|---|---|"]
    for name, values in [*recoveries.items(), ("all", everything)]:
        times = f"{statistics.median(values):.2f} s | {quantile(values, 0.95):.2f} s" if values else "- | -"
        lines.append(f"| {name} | {counts.get(name, sum(counts.values()))} | {times} |")
    wall_s, undisturbed_s = sum(o.wall_s for o in outcomes), sum(o.undisturbed_s for o in outcomes)
    ended = sum(outcome.ended for outcome in outcomes)
    problems = [problem for outcome in outcomes for problem in outcome.problems]
    count = "1 run" if len(outcomes) == 1 else f"{len(outcomes)} runs at the same time"
    lines += [
        "",
        f"{sum(counts.values())} faults on {count}, {wall_s / len(outcomes):.0f} s each; undisturbed, in parallel, the "
        f"same steps took {undisturbed_s / len(outcomes):.0f} s: goodput {undisturbed_s / wall_s:.2f}. A run ended by "
        f"itself and was started again {ended} times.",
        "FAILED: " + "; ".join(problems) if problems else SUCCESS,
    ]
    return lines, not problems and not ended


if __name__ == "__main__":
    sys.exit(main())
