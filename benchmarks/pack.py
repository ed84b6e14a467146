"""Large data: the speed of packing, the cost of training from packed data, and that neither depends on the set size.

    python benchmarks/pack.py [--pictures 100000] [--million 1000000] [--output benchmarks/results]

Generates a folder of small JPEGs, packs it with `paceline data pack` on all cores while the memory of all processes is
measured, reads both with the loader, and trains from both. Then it writes shards of 10 thousand, 100 thousand and a
million pictures directly, and takes the same step on all three, alternating. Cost per sample and memory of a rank must
not depend on the number of pictures. All files are in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

CLASSES, SIDE_ON_DISK, IMAGE_SIZE = 10, 64, 32
BATCH, ROUNDS, STEPS = 256, 12, 4
TRAIN = ["--dataset=folder", f"--image-size={IMAGE_SIZE}", "--augment=imagenet", f"--global-batch-size={BATCH}"]
TRAIN += ["--track", "--log-frequency=20", "--epochs=1", "--processes=2", "--test-batch-size=128"]


def make_pictures(folder: Path, count: int) -> None:
    """Smooth random colours as JPEG, with the size and decoding time of a small photo."""
    starts = list(range(0, count, 2000))
    with ProcessPoolExecutor() as pool:
        list(pool.map(_make_some, [str(folder)] * len(starts), starts, [min(2000, count - s) for s in starts]))


def _make_some(folder: str, start: int, count: int) -> None:
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(start)
    for number in range(start, start + count):
        path = Path(folder) / f"class{number % CLASSES}" / f"{number:07}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        patches = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(patches).resize((SIDE_ON_DISK, SIDE_ON_DISK), Image.Resampling.BICUBIC).save(path, quality=90)


def write_shards(folder: Path, count: int) -> None:
    """A packed data set of random pixels, in the format of `paceline data pack`."""
    import numpy as np

    from paceline.data.pack_format import FINISHED, Packed, Shard, checksum, picture_side, shard_layout
    from paceline.data.pictures import DECODER

    side = picture_side(IMAGE_SIZE)
    sizes = {"train": count, "test": 2 * BATCH}
    per_shard = max(64 * 2**20, count * 3 * side * side // 256) // (3 * side * side)
    folder.mkdir()
    random, shards = np.random.default_rng(0), []
    for half, size in sizes.items():
        for name, pictures in shard_layout(half, size, per_shard):
            (folder / name).write_bytes(random.bytes(pictures * 3 * side * side))
            shards.append(Shard(name, pictures, checksum(folder / name), ""))
    classes = tuple(f"class{number}" for number in range(CLASSES))
    per_class = {half: tuple(len(range(n, size, CLASSES)) for n in range(CLASSES)) for half, size in sizes.items()}
    packed = Packed(classes, per_class, side, per_shard, (), DECODER)
    (folder / FINISHED).write_text(replace(packed, shards=tuple(shards)).to_text())


def memory_mb(pid: int) -> tuple[float, float]:
    """Anonymous memory, and mapped file pages (which the kernel may drop at any time)."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return int(lines["RssAnon"].split()[0]) / 1024, int(lines["RssFile"].split()[0]) / 1024
    except (OSError, KeyError):
        return 0.0, 0.0


def watch(command: list[str]) -> tuple[float, float, list[tuple[float, float]]]:
    """Run a command; seconds, CPU seconds, and the largest process's anonymous and mapped memory over time."""
    began, cpu_began, seen = time.perf_counter(), _cpu_of_children(), []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while process.poll() is None:
            seen.append(max(memory_mb(pid) for pid in _session(process.pid)))
            time.sleep(0.25)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - began, _cpu_of_children() - cpu_began, seen


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _session(leader: int) -> Iterator[int]:
    yield leader
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                yield int(entry.name)
        except (OSError, IndexError):
            continue


def thirds(seen: list[tuple[float, float]]) -> str:
    """The largest anonymous and mapped memory in each third of the time."""
    size = max(1, len(seen) // 3)
    parts = [seen[:size], seen[size : 2 * size], seen[2 * size :]]
    return ", ".join(f"{max(a for a, _ in part):.0f} + {max(f for _, f in part):.0f}" for part in parts if part)


def paceline(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline", *arguments]


def open_rig(folder: Path, num_workers: int = 2) -> Any:
    import torch

    from paceline.runtime.detect import World
    from paceline.settings.load import load_config
    from paceline.training.components import build_components

    torch.set_num_threads(1)
    flags = [*TRAIN, f"--data-dir={folder}", f"--num-workers={num_workers}", "--processes=1"]
    return build_components(
        load_config("shapes-cnn", flags).config, World(0, 1, 0, 1, "the benchmark", "here", "cpu", "", 1)
    )


def read_rate(folder: Path, seconds: float = 8.0) -> tuple[float, float]:
    """Images per second, and CPU per image, of the loader alone in one process, including augmentation."""
    from paceline.tools.bench.data import endless_batches

    batches = endless_batches(open_rig(folder))
    next(batches)
    began, cpu_began, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        count += len(next(batches).labels)
    return count / (time.perf_counter() - began), (time.process_time() - cpu_began) / count


def train(folder: Path, run: Path, steps: int) -> tuple[float, float, list[tuple[float, float]]]:
    """Images/s and waiting share in the second half of a run, and the memory of its ranks over time."""
    command = paceline("train", "shapes-cnn", *TRAIN, f"--data-dir={folder}", f"--max-steps={steps}")
    _, _, seen = watch([*command, f"--output-dir={run}"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "step"]
    rows = rows[len(rows) // 2 :]
    return *(statistics.median(row[key] for row in rows) for key in ("throughput", "data_wait")), seen  # type: ignore[return-value]


def compare_sizes(folders: dict[int, Path]) -> list[str]:
    """The same step on data sets of different sizes, alternating."""
    from paceline.tools.bench.data import endless_batches
    from paceline.tools.bench.step import take_step

    works: dict[int, Callable[[], None]] = {}
    for count, folder in folders.items():
        components = open_rig(folder)
        batches = endless_batches(components)
        works[count] = lambda components=components, batches=batches: take_step(components.step, next(batches))
        works[count]()
    times: dict[int, list[tuple[float, float]]] = {count: [] for count in works}
    for number in range(ROUNDS):
        for count in list(works)[number % 3 :] + list(works)[: number % 3]:
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                works[count]()
            times[count].append(((time.perf_counter() - began) / STEPS, (time.process_time() - cpu) / STEPS))
    lines = [
        "| pictures | images/s (wall) | against 10 thousand | CPU per image | against 10 thousand |",
        "|---|---|---|---|---|",
    ]
    base = times[min(times)]
    for count, mine in times.items():
        wall, cpu = (statistics.median(pair[clock] for pair in mine) for clock in (0, 1))
        ratios = [statistics.median(a[k] / b[k] for a, b in zip(mine, base, strict=True)) for k in (0, 1)]
        lines.append(
            f"| {count:,} | {BATCH / wall:,.0f} | {1 / ratios[0] - 1:+.1%} "
            f"| {1e6 * cpu / BATCH:.0f} us | {ratios[1] - 1:+.1%} |"
        )
    return lines


def memory_of_size(folder: Path, steps: int) -> str:
    """Take steps on this data set in a separate process. Returns its memory in each third."""
    done = subprocess.run(
        [sys.executable, __file__, "--one", str(folder), str(steps)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _one(folder: Path, steps: int) -> None:
    from paceline.tools.bench.data import endless_batches
    from paceline.tools.bench.step import take_step

    components = open_rig(folder)
    batches, seen = endless_batches(components), []
    for _ in range(steps):
        take_step(components.step, next(batches))
        seen.append(memory_mb(os.getpid()))
    print(thirds(seen))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=100_000)
    parser.add_argument("--million", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        _one(Path(arguments.one[0]), int(arguments.one[1]))
        return
    home = Path(tempfile.mkdtemp(prefix="pack-", dir=arguments.folder))
    try:
        lines = report(home, arguments)
    finally:
        shutil.rmtree(home)
    text = "\n".join(lines) + "\n"
    print(text)
    (arguments.output / f"pack-{date.today()}.md").write_text(text)


def report(home: Path, arguments: argparse.Namespace) -> list[str]:
    import torch

    from paceline.data.pack_format import open_packed

    load = os.getloadavg()[0]
    count, source, packed = arguments.pictures, home / "pictures", home / "packed"
    began = time.perf_counter()
    make_pictures(source, count)
    source_mb = sum(path.stat().st_size for path in source.rglob("*.jpg")) / 1e6
    made_s = time.perf_counter() - began
    pack_s, pack_cpu_s, pack_memory = watch(
        paceline("data", "pack", str(source), str(packed), f"--image-size={IMAGE_SIZE}")
    )
    shards = open_packed(packed)
    again_s, _, _ = watch(paceline("data", "pack", str(source), str(packed), f"--image-size={IMAGE_SIZE}"))
    check_s, _, _ = watch(paceline("data", "check", str(packed)))
    lines = [
        f"# {count:,} pictures: packing, and training from packed data",
        "",
        f"{date.today()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}; load before the start {load:.1f}"
        f"{', from other programs on the machine' if load > 1 else ''}; command: `python benchmarks/pack.py`",
        "",
        f"| packing {count:,} JPEGs of {SIDE_ON_DISK} x {SIDE_ON_DISK} pixels | |",
        "|---|---|",
        f"| pictures on disk | {source_mb:,.0f} MB (made in {made_s:.0f} s) |",
        f"| packed, {shards.side} x {shards.side} | {shards.size_bytes / 1e6:,.0f} MB in {len(shards.shards)} shards |",
        f"| `paceline data pack` | {pack_s:.1f} s, {count / pack_s:,.0f} pictures/s |",
        f"| its CPU time, all processes | {1e6 * pack_cpu_s / count:.0f} us per picture |",
        f"| the same again, nothing to do | {again_s:.1f} s |",
        f"| `paceline data check` | {check_s:.1f} s, {shards.size_bytes / 1e6 / check_s:,.0f} MB/s |",
        f"| memory of its largest process, by thirds (anonymous + mapped files) | {thirds(pack_memory)} MB |",
        "",
        "| reading and training, 2 cores | folder | packed |",
        "|---|---|---|",
    ]
    rates = [read_rate(folder) for folder in (source, packed)]
    lines.append(f"| loader alone, one process | {rates[0][0]:,.0f} images/s | {rates[1][0]:,.0f} images/s |")
    lines.append(f"| its CPU per image | {1e6 * rates[0][1]:.0f} us | {1e6 * rates[1][1]:.0f} us |")
    runs = [train(folder, home / f"run-{folder.name}", arguments.steps) for folder in (source, packed)]
    lines.append(f"| `paceline train`, 2 ranks, cnn | {runs[0][0]:,.0f} images/s | {runs[1][0]:,.0f} images/s |")
    lines.append(f"| share of waiting for data (including augmentation) | {runs[0][1]:.0%} | {runs[1][1]:.0%} |")
    lines.append(f"| memory of a rank, by thirds | {thirds(runs[0][2])} MB | {thirds(runs[1][2])} MB |")
    sizes = {10_000: home / "10k", 100_000: home / "100k", arguments.million: home / "1m"}
    for size, folder in sizes.items():
        write_shards(folder, size)
    lines += [
        "",
        f"## The same step on sets of different sizes, alternating ({ROUNDS} rounds of {STEPS} steps, medians)",
        "",
    ]
    lines += compare_sizes(sizes)
    lines += [
        "",
        "| pictures | on disk | memory of a rank over 120 steps, by thirds (anonymous + mapped files) |",
        "|---|---|---|",
    ]
    for size, folder in sizes.items():
        on_disk = open_packed(folder).size_bytes / 1e6
        lines.append(f"| {size:,} | {on_disk:,.0f} MB | {memory_of_size(folder, 120)} MB |")
    return lines


if __name__ == "__main__":
    main()
