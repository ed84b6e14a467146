"""Pictures from disk to normalised batches: Paceline from a folder and from shards, and a DataLoader with Pillow.

    python benchmarks/pictures.py FOLDER [--side 224] [--batch 32] [--workers 2] [--rounds 5] [--output FILE]

FOLDER has pictures as `--dataset folder` reads them; the training part is used. Every way gives the same kind of batch:
a random resized crop, a random flip, and normalised float32 [batch, 3, side, side] in CPU memory. The DataLoader does
what torchvision's RandomResizedCrop, RandomHorizontalFlip, ToTensor and Normalize do, by the same calls of Pillow and
torch. torchvision itself is not needed. A round measures each way once, in a process of its own, over one epoch, after
an epoch that is not measured. Medians over rounds are shown. CPU time counts all threads and processes: it says what a
picture costs, also on a machine that is busy with other work.

The index of a million packed pictures, the order of an epoch of them, and the memory of a rank are measured as well.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

_READS = (20_000, 40_000, 60_000)  # of a million pictures
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WAYS = {
    "DataLoader with Pillow": "dataloader",
    "folder, --decoder pillow": "folder pillow",
    "folder, --decoder turbo": "folder turbo",
    "shards, --decoder pillow": "shards pillow",
    "shards, --decoder turbo": "shards turbo",
}


class UsualDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Pictures as a plain training script reads them."""

    def __init__(self, paths: list[Path], labels: list[int], side: int) -> None:
        self.paths, self.labels, self.side = paths, labels, side
        self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as opened:
            image = opened.convert("RGB")
        image = image.crop(_random_box(*image.size)).resize((self.side, self.side), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()  # ToTensor
        return pixels.to(torch.float32).div(255).sub_(self.mean).div_(self.std), self.labels[index]


def _random_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area, ratio = width * height * random.uniform(0.08, 1), math.exp(random.uniform(-1, 1) * math.log(4 / 3))
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            left, top = random.randint(0, width - columns), random.randint(0, height - rows)
            return left, top, left + columns, top + rows
    return 0, 0, width, height


def usual_epochs(folder: Path, args: argparse.Namespace) -> Iterator[Iterator[torch.Tensor]]:
    from paceline.data.picture_folder import find_pictures

    part = find_pictures(folder).parts["train"]
    labels = [label for label, size in enumerate(part.per_class) for _ in range(size)]
    dataset = UsualDataset(list(part.paths), labels, args.side)
    loader = torch.utils.data.DataLoader(dataset, args.batch, shuffle=True, num_workers=args.workers, drop_last=True)
    while True:
        yield (inputs for inputs, _ in loader)


def paceline_epochs(folder: Path, library: str, args: argparse.Namespace) -> Iterator[Iterator[torch.Tensor]]:
    from paceline.data.augment import build_pipeline
    from paceline.data.loader import Loader
    from paceline.data.registry import load_dataset
    from paceline.runtime.detect import World
    from paceline.settings.schema import DataConfig

    config = DataConfig(
        dataset="folder",
        data_dir=str(folder),
        image_size=args.side,
        augment="resized-crop",
        crop_from="picture",
        decoder=library,
        num_workers=args.workers,
    )
    data = load_dataset(config, 0)
    world = World(0, 1, 0, 1, "a benchmark", "here", "cpu", "gloo", 1)
    loader = Loader(data.train, torch.arange(len(data.train)), build_pipeline(config, data.info, 1), world)
    epoch = 0
    while True:
        batches = loader.train_epoch(seed=1, epoch=epoch, global_batch_size=args.batch, first_step=0)
        yield (batch.inputs for batch in batches)
        epoch += 1


def measure(way: str, args: argparse.Namespace) -> dict[str, float]:
    """One epoch in this process, after one that is not measured."""
    from paceline.runtime.memory import keep_freed_memory

    keep_freed_memory()  # as a run on CPUs does
    torch.set_num_threads(1)
    kind, _, library = way.partition(" ")
    folder = Path(args.packed if kind == "shards" else args.folder)
    epochs = usual_epochs(folder, args) if kind == "dataloader" else paceline_epochs(folder, library, args)
    for _ in next(epochs):
        pass
    cpu_s, began, pictures = _cpu_s(), time.perf_counter(), 0
    for inputs in next(epochs):
        assert inputs.shape[1:] == (3, args.side, args.side)
        pictures += len(inputs)
    wall_s = time.perf_counter() - began
    return {"pictures": pictures, "wall_s": wall_s, "cpu_s": _cpu_s() - cpu_s}


def _cpu_s() -> float:
    """Of this process and of workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure_million(folder: Path) -> dict[str, float]:
    """A packed set of a million entries, whose pictures are all the same bytes."""
    from paceline.data.order import epoch_order
    from paceline.data.pack_format import FINISHED, Encoding, Packed, Shard, shard_layout
    from paceline.data.packed_pictures import ENTRY
    from paceline.data.pictures import DECODER
    from paceline.data.registry import load_dataset
    from paceline.settings.schema import DataConfig

    total, per_shard = 1_000_000, 4_000
    one = io.BytesIO()
    Image.new("RGB", (8, 8)).save(one, "JPEG")
    shards = []
    for name, count in [*shard_layout("train", total, per_shard, "enc"), *shard_layout("test", 1, per_shard, "enc")]:
        index = np.zeros(count, ENTRY)
        index["bytes"], index["name_end"] = len(one.getvalue()), 1
        (folder / name).write_bytes(one.getvalue() + index.tobytes() + b"x")
        shards.append(Shard(name, count, "0" * 8, "", (), len(one.getvalue()), 1))
    per_class = {"train": (total // 1000,) * 1000, "test": (1, *([0] * 999))}
    classes, contents = tuple(f"class {number}" for number in range(1000)), {"train": "0", "test": "0"}
    described = Packed(classes, per_class, 0, per_shard, tuple(shards), DECODER, Encoding(), contents)
    (folder / FINISHED).write_text(described.to_text())
    load_dataset(DataConfig(), 0)  # imports
    before, began, cpu_began = _memory_mb(), time.perf_counter(), time.process_time()
    data = load_dataset(DataConfig(dataset="folder", data_dir=str(folder)), 0)
    index_s, index_cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    opened_mb, began, cpu_began = _memory_mb() - before, time.perf_counter(), time.process_time()
    order = epoch_order(total, 1, 1)
    found = {
        "index_s": index_s,
        "index_cpu_s": index_cpu_s,
        "opened_mb": opened_mb,
        "order_s": time.perf_counter() - began,
        "order_cpu_s": time.process_time() - cpu_began,
    }
    for number, ids in enumerate(order[: _READS[-1]].split(50), 1):
        data.train.read(ids)
        if 50 * number in _READS:
            found[f"read_{50 * number}_mb"] = _memory_mb() - before
    return found


def _memory_mb() -> float:
    """Memory of this process alone, without files that are mapped."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def in_child(way: str, args: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, args.folder, "--way", way, "--packed", args.packed]
    for name in ("side", "batch", "workers"):
        command += [f"--{name}", str(getattr(args, name))]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def report(args: argparse.Namespace, rounds: list[dict[str, dict[str, float]]], million: dict[str, float]) -> str:
    import PIL
    import simplejpeg
    from PIL import features

    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    lines = [
        f"{platform.machine()}, {cores} cores, load {load:.1f}; Python {platform.python_version()},"
        f" torch {torch.__version__}, Pillow {PIL.__version__} (libjpeg-turbo {features.version('libjpeg_turbo')}),"
        f" simplejpeg {simplejpeg.__version__}",
        "",
        f"{args.side} pixels, batches of {args.batch}, {args.workers} threads or processes, {len(rounds)} rounds",
        "",
        "| way | pictures/s | times the DataLoader | CPU ms per picture | of the DataLoader's |",
        "|---|---|---|---|---|",
    ]
    usual = {}
    for title, way in WAYS.items():
        rate = statistics.median(found[way]["pictures"] / found[way]["wall_s"] for found in rounds)
        cpu_ms = statistics.median(1000 * found[way]["cpu_s"] / found[way]["pictures"] for found in rounds)
        usual = usual or {"rate": rate, "cpu_ms": cpu_ms}
        lines.append(
            f"| {title} | {rate:,.0f} | {rate / usual['rate']:.2f} | {cpu_ms:.2f} | 1/{usual['cpu_ms'] / cpu_ms:.2f} |"
        )
    lines += [
        "",
        f"A million packed pictures: index opened in {million['index_s']:.2f} s ({million['index_cpu_s']:.2f} s of CPU"
        f" time) with {million['opened_mb']:.0f} MB, an epoch's order in {million['order_s']:.2f} s"
        f" ({million['order_cpu_s']:.2f} s); "
        + ", ".join(f"{million[f'read_{n}_mb']:.0f} MB" for n in _READS)
        + f" after {', '.join(f'{n:,}' for n in _READS)} reads.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--packed", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way == "million":
        print(json.dumps(measure_million(Path(args.packed))))
        return
    if args.way:
        print(json.dumps(measure(args.way, args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        args.packed = str(Path(folder) / "packed")
        command = [sys.executable, "-m", "paceline", "data", "pack", args.folder, args.packed, "--format", "encoded"]
        subprocess.run(command, check=True)
        rounds = [{way: in_child(way, args) for way in WAYS.values()} for _ in range(args.rounds)]
        args.packed = str(Path(folder) / "million")
        Path(args.packed).mkdir()
        text = report(args, rounds, in_child("million", args))
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
