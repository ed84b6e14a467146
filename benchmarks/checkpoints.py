"""The cost of saving a checkpoint of 250 MB: torch.save, torch.distributed.checkpoint and Paceline, on one disk.

    python benchmarks/checkpoints.py [--folder PATH] [--repeats 5] [--output benchmarks/results]

The state has fp32 weights and momentum, 125 MB each. Each method saves it five times, in alternating order, into a new
folder after a sync of the disk. `total` ends when the checkpoint is saved (for the asynchronous save: when no write is
pending). `stall` ends when the caller can continue training. Paceline's time includes reading back and verifying. The
cost of checksums is the difference to a save with a constant instead of each checksum.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import paceline
from paceline.checkpoints import format as format_module
from paceline.checkpoints import payload as payload_module
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention
from paceline.runtime.detect import World

ALONE = World(0, 1, 0, 1, "the benchmark", "here", "cpu", "gloo", torch.get_num_threads())
NUM_TENSORS, ITEMS = 50, 625_000  # 50 tensors of 2.5 MB: 125 MB of weights, and 125 MB of momentum
State = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Timing:
    total_s: float
    stall_s: float
    cpu_s: float = 0.0  # of all threads


def make_state() -> State:
    torch.manual_seed(0)
    weights = {f"layer{number}.weight": torch.randn(ITEMS) for number in range(NUM_TENSORS)}
    return {"model": weights, "optimizer": {f"{name}/momentum_buffer": torch.randn(ITEMS) for name in weights}}


class Ours:
    """One manager for all repeats, as in a run: only the first save allocates staging memory."""

    def __init__(self, *, is_async: bool, has_checksums: bool = True) -> None:
        self._is_async, self._has_checksums = is_async, has_checksums
        self._manager: CheckpointManager | None = None
        self._step = 0

    def __call__(self, state: State, folder: Path) -> Timing:
        self._step += 1
        if self._manager is None:
            retention = Retention(keep_last=10**6)  # do not measure deletion
            self._manager = CheckpointManager(
                folder.parent / f"ours-{id(self)}",
                ALONE,
                is_sharded=False,
                retention=retention,
                is_async=self._is_async,
            )
        about = {"step": self._step}
        details = {"step": self._step, "keep": False, "validation": None}
        with checksums_of(self._has_checksums):
            started, cpu_started = time.perf_counter(), time.process_time()
            self._manager.save(state, details, about, is_best=False)
            stall_s = time.perf_counter() - started
            self._manager.wait()
            return Timing(time.perf_counter() - started, stall_s, time.process_time() - cpu_started)


@contextmanager
def checksums_of(are_real: bool) -> Iterator[None]:
    real = format_module.add_checksum
    if not are_real:
        format_module.add_checksum = payload_module.add_checksum = lambda data, total=0: 0  # type: ignore[assignment]
    try:
        yield
    finally:
        format_module.add_checksum = payload_module.add_checksum = real


def save_with_torch(state: State, folder: Path) -> Timing:
    folder.mkdir()
    started = time.perf_counter()
    torch.save(state, folder / "state.pt")
    seconds = time.perf_counter() - started
    return Timing(seconds, seconds)


def save_with_torch_and_flush(state: State, folder: Path) -> Timing:
    folder.mkdir()
    started = time.perf_counter()
    with (folder / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    return Timing(seconds, seconds)


def save_with_dcp(state: State, folder: Path) -> Timing:
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example, that there is only one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    seconds = time.perf_counter() - started
    return Timing(seconds, seconds)


METHODS: dict[str, Callable[[State, Path], Timing]] = {
    "torch.save (not flushed to disk)": save_with_torch,
    "torch.save, flushed": save_with_torch_and_flush,
    "dcp.save": save_with_dcp,
    "paceline, sync": Ours(is_async=False),
    "paceline, async": Ours(is_async=True),
    "paceline, sync, no checksums": Ours(is_async=False, has_checksums=False),
}


def measure(folder: Path, repeats: int) -> dict[str, list[Timing]]:
    """Interleave the methods, so that other load affects all of them. Round 0 is the warm-up."""
    state = make_state()
    timings: dict[str, list[Timing]] = {name: [] for name in METHODS}
    names = list(METHODS)
    for number in range(repeats + 1):
        turn = number % len(names)  # rotate the order, because a save may affect the next one through the disk
        for name in [*names[turn:], *names[:turn]]:
            os.sync()
            timings[name].append(METHODS[name](state, folder / f"{number}-{names.index(name)}"))
            for leftover in folder.glob("*/step-*"):
                shutil.rmtree(leftover)
            for leftover in folder.glob("[0-9]*"):
                shutil.rmtree(leftover)
    return timings


def report(rounds: dict[str, list[Timing]], repeats: int, others: float) -> str:
    size_mb = 2 * NUM_TENSORS * ITEMS * 4 / 1e6
    timings = {name: found[1:] for name, found in rounds.items()}
    totals = {name: statistics.median(timing.total_s for timing in found) for name, found in timings.items()}
    stalls = {name: statistics.median(timing.stall_s for timing in found) for name, found in timings.items()}
    sync, bare = totals["paceline, sync"], totals["paceline, sync, no checksums"]
    lines = [
        f"# Saving a checkpoint of {size_mb:.0f} MB",
        "",
        f"{date.today().isoformat()}, {machine()}",
        "",
        f"torch {torch.__version__}, paceline {paceline.__version__}, Python {platform.python_version()},"
        f" median of {repeats} (smallest to largest); command: `{' '.join(['python', *sys.argv])}`",
        "",
        "| saved by | total | stall of the caller |",
        "| --- | --- | --- |",
    ]
    for name, found in timings.items():
        cells = [
            f"{median:.3f} s ({min(values):.3f} to {max(values):.3f})"
            for median, values in (
                (totals[name], [timing.total_s for timing in found]),
                (stalls[name], [timing.stall_s for timing in found]),
            )
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    share = stalls["paceline, async"] / sync
    first_s = rounds["paceline, async"][0].stall_s
    with_sums, without = (
        statistics.median(timing.cpu_s for timing in timings[name])
        for name in ("paceline, sync", "paceline, sync, no checksums")
    )
    lines += [
        "",
        f"- The asynchronous save blocks its caller for {share:.1%} of a synchronous save (target: at most 25 %)."
        f" The first one, which also allocates its memory, blocked it for {first_s:.3f} s.",
        f"- Checksums cost {(sync - bare) / sync:.1%} of a synchronous save (target: less than 5 %); in CPU time of all"
        f" threads, {with_sums:.3f} s with and {without:.3f} s without them.",
        f"- Other load on the machine, including writes by the kernel, took {others:.0%} of its CPU time.",
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    with Path("/proc/cpuinfo").open() as file:
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "unknown CPU")
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"


def busy_s() -> tuple[float, float]:
    """CPU seconds so far: of the whole machine, and of this process."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to save: a folder on the disk to be measured")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        started, (machine_s, own_s) = time.perf_counter(), busy_s()
        rounds = measure(Path(folder), options.repeats)
        seconds, (machine_end_s, own_end_s) = time.perf_counter() - started, busy_s()
    others_s = (machine_end_s - machine_s) - (own_end_s - own_s)
    text = report(rounds, options.repeats, others_s / seconds / (os.cpu_count() or 1))
    print(text, end="")
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"checkpoints-{date.today().isoformat()}.md").write_text(text)


if __name__ == "__main__":
    main()
