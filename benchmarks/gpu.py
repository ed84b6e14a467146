"""Compare Paceline with its peers on one GPU: images per second of the same model, batch and data.

    python benchmarks/gpu.py --data-dir data --rounds 3 --output benchmarks/results/gpu-DATE.md

Trainers alternate, each in a new process. The table has medians and the range over rounds. The limit, a bare step on
one batch, varies little and is measured once. Paceline is measured as `paceline train` with default metrics,
checkpoints, validation and guards, over whole epochs after the first. The peers (benchmarks/gpu_peers.py; they need
torchvision, lightning and accelerate) do not log, save or validate while they are timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).parent
PEERS = ("seed", "lightning", "accelerate", "limit")


@dataclass(frozen=True)
class Work:
    title: str
    recipe: str
    model: str
    batch: int
    epochs: int  # of Paceline; the first is not counted
    num_samples: int  # if CIFAR-10 is missing


WORKS = {
    "vgg19": Work("VGG19 at 224x224, batch 256", "cifar10-vgg19", "vgg19", 256, 2, 12_800),
    "resnet18-512": Work("ResNet-18 at 32x32, batch 512", "cifar10-resnet18", "resnet18", 512, 8, 50_000),
    "resnet18-1024": Work("ResNet-18 at 32x32, batch 1024", "cifar10-resnet18", "resnet18", 1024, 8, 50_000),
}


def run_ours(work: Work, data_dir: str) -> float:
    """The median over the epochs after the first, of a complete run."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--epochs={work.epochs}", f"--global-batch-size={work.batch}", f"--output-dir={folder}/run"]
        flags += ["--weights=none", "--compile=always", "--processes=1", f"--data-dir={data_dir}"]
        if not (Path(data_dir) / "cifar-10-batches-bin").is_dir():
            flags += ["--dataset=synthetic", "--input-size=3x32x32", f"--num-samples={work.num_samples}"]
        _run([sys.executable, "-m", "paceline", "train", work.recipe, *flags])
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    epochs = [row["throughput"] for row in rows if row.get("phase") == "train" and row.get("epoch", 0) > 1]
    return statistics.median(epochs)


def run_peer(name: str, work: Work, data_dir: str, steps: int) -> float:
    command = [sys.executable, str(HERE / "gpu_peers.py"), name, work.model, f"--batch={work.batch}"]
    output = _run([*command, f"--steps={steps}", f"--data-dir={data_dir}"])
    return float(json.loads(output.strip().splitlines()[-1])["images_per_s"])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def describe_machine() -> str:
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    for name in ("torchvision", "lightning", "accelerate"):
        try:
            versions.append(f"{name} {__import__(name).__version__}")
        except ImportError:
            versions.append(f"no {name}")
    return f"{torch.cuda.get_device_name()}; {', '.join(versions)}; {date.today().isoformat()}"


def make_table(found: dict[str, dict[str, list[float]]]) -> list[str]:
    names = ["ours", *PEERS]
    lines = ["| work | " + " | ".join(names) + " | ours / best peer | ours / limit |", "|---" * (len(names) + 3) + "|"]
    for title, rates in found.items():
        cells, medians = [], {}
        for name in names:
            values = rates.get(name, [])
            if not values:
                cells.append("-")
                continue
            medians[name] = statistics.median(values)
            cells.append(f"{medians[name]:,.0f} ({min(values):,.0f} - {max(values):,.0f})")
        peers = [medians[name] for name in PEERS[:-1] if name in medians]
        ratio = f"{medians['ours'] / max(peers):.2f}" if peers and "ours" in medians else "-"
        of_limit = f"{medians['ours'] / medians['limit']:.2f}" if "limit" in medians and "ours" in medians else "-"
        lines.append(f"| {title} | " + " | ".join([*cells, ratio, of_limit]) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of a peer, after its warm-up")
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--contenders", default=",".join(("ours", *PEERS)))
    parser.add_argument("--output")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU, and there is none; for CPUs: make bench-cpu")
    contenders = given.contenders.split(",")
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(given.rounds):
        for work in (WORKS[name] for name in given.works.split(",")):
            for name in contenders:
                if name == "limit" and number:
                    continue
                is_ours = name == "ours"
                rate = run_ours(work, given.data_dir) if is_ours else run_peer(name, work, given.data_dir, given.steps)
                found.setdefault(work.title, {}).setdefault(name, []).append(rate)
                print(f"round {number + 1}  {work.title}  {name:<10} {rate:,.0f} images/s", flush=True)
        write_page(found, given.data_dir, given.output)


def write_page(found: dict[str, dict[str, list[float]]], data_dir: str, output: str | None) -> None:
    """Write the results so far."""
    real = (Path(data_dir) / "cifar-10-batches-bin").is_dir()
    lines = [
        *(
            "# One GPU: Paceline and its peers",
            "",
            f"{describe_machine()}; {'CIFAR-10' if real else 'CIFAR-shaped data'}.",
        ),
        *("", f"    python {' '.join(sys.argv)}", ""),
        "Images per second, median over rounds (smallest - largest).",
        *("", *make_table(found), ""),
    ]
    print("\n".join(lines), flush=True)
    if output:
        Path(output).write_text("\n".join(lines))


if __name__ == "__main__":
    main()
