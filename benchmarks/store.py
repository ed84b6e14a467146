"""Pictures from an S3 server on this machine, compared with the same tar files on its disk, in one run.

    .venv-flows/bin/python benchmarks/store.py PICTURES [--shards 16] [--rounds 3] [--output benchmarks/results]

PICTURES is a folder with train/CLASS and test/CLASS. Its pictures become tar files, which a moto server serves. An
epoch reads every training picture in a random order with two threads: alone, and decoded to 256 x 256. From the store
the first epoch fetches the files; later ones read their copies. Disk and store take turns. All files are temporary.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import statistics
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness.faulty_s3 import faulty_s3
from paceline.data.encoded import EncodedDataset
from paceline.data.order import epoch_order
from paceline.data.registry import load_dataset
from paceline.settings.schema import DataConfig

THREADS, BATCH = 2, 64


def write_shards(pictures: Path, target: Path, shards: int) -> int:
    """Returns the number of bytes."""
    target.mkdir()
    for part in ("train", "test"):
        paths = sorted(path for path in (pictures / part).rglob("*") if path.is_file())
        for shard in range(shards):
            with tarfile.open(target / f"{part}-{shard:06}.tar", "w") as tar:
                for path in paths[shard::shards]:
                    tar.add(path, path.relative_to(pictures / part).as_posix())
    return sum(path.stat().st_size for path in target.iterdir())


def time_epoch(dataset: EncodedDataset, epoch: int, *, decodes: bool) -> tuple[float, float]:
    """Seconds, and seconds of CPU time."""
    order = epoch_order(len(dataset), 0, epoch)
    began, cpu_began = time.perf_counter(), time.process_time()
    dataset.announce(order)
    if decodes:
        for ids in order.split(BATCH):
            dataset.read(ids)
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(dataset.pictures.read, order.tolist(), chunksize=BATCH):
                pass
    return time.perf_counter() - began, time.process_time() - cpu_began


def open_train(data_dir: str, cache: Path) -> EncodedDataset:
    config = DataConfig(
        dataset="folder", data_dir=data_dir, image_size=224, num_workers=THREADS, cache_dir=str(cache), cache_gb=20
    )
    train = load_dataset(config, 0).train
    assert isinstance(train, EncodedDataset)
    return train


def measure(pictures: Path, shards: int, rounds: int, work: Path) -> str:
    size_bytes = write_shards(pictures, work / "shards", shards)
    with faulty_s3() as s3:
        os.environ.update(s3.environment())
        s3.make_bucket("data")
        for path in sorted((work / "shards").iterdir()):
            s3.write("data", f"set/{path.name}", path.read_bytes())
        disk = open_train(str(work / "shards"), work / "disk")
        began = time.perf_counter()
        store = open_train("s3://data/set", work / "store")
        index_s = time.perf_counter() - began
        for copy in (work / "store" / "data").glob("*.data"):
            copy.unlink()  # so that the first epoch fetches
        first_s, _ = time_epoch(store, 0, decodes=True)
        deadline = time.monotonic() + 120
        while len(list((work / "store" / "data").glob("*.data"))) < shards and time.monotonic() < deadline:
            time.sleep(0.05)
        times: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for number in range(1, rounds + 1):
            for name, dataset in (("disk", disk), ("store", store)):
                for decodes in (False, True):
                    times.setdefault((name, decodes), []).append(time_epoch(dataset, number, decodes=decodes))
    count = len(disk)
    rate = {key: count / min(wall_s for wall_s, _ in values) for key, values in times.items()}
    cpu_us = {key: statistics.median(cpu_s for _, cpu_s in values) / count * 1e6 for key, values in times.items()}
    lines = io.StringIO()
    print("# Pictures from an S3 server on the same machine\n", file=lines)
    about = f"{os.cpu_count()} cores, Linux {platform.release()}, torch {torch.__version__}, "
    about += f"Python {platform.python_version()}"
    load = os.getloadavg()[0]
    command = f"python benchmarks/store.py PICTURES --shards {shards} --rounds {rounds}"
    print(f"{date.today()}, {about}; load {load:.1f}, also from other programs; command: `{command}`\n", file=lines)
    print(
        f"{count:,} photos in {shards} tar files, {size_bytes / 1e6:,.0f} MB with the test pictures; moto server; "
        f"{THREADS} threads; {rounds} epochs, disk and store in turn: the fastest, and the median of the CPU time.\n",
        file=lines,
    )
    print("| | disk | store, after the first epoch | store / disk |", file=lines)
    print("|---|---|---|---|", file=lines)
    for decodes, name in ((False, "read"), (True, "read and decoded to 256 x 256")):
        fast, slow = rate["disk", decodes], rate["store", decodes]
        print(f"| {name}, pictures/s | {fast:,.0f} | {slow:,.0f} | {slow / fast:.2f} |", file=lines)
        disk_us, store_us = cpu_us["disk", decodes], cpu_us["store", decodes]
        ratio = disk_us / store_us
        print(f"| {name}, CPU time per picture | {disk_us:,.0f} us | {store_us:,.0f} us | {ratio:.2f} |", file=lines)
    print(
        f"\nThe first epoch from the store, decoded, while files are fetched: {count / first_s:,.0f} pictures/s. "
        f"Indexing the store: {index_s:.1f} s.",
        file=lines,
    )
    return lines.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        report = measure(settings.pictures, settings.shards, settings.rounds, Path(work))
    print(report)
    if settings.output:
        (settings.output / f"store-{date.today()}.md").write_text(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
