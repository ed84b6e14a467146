"""Compare Paceline with its peers on one GPU: images per second of the same model, batch and data.

    python benchmarks/gpu.py --data-dir data --rounds 3 --output benchmarks/results/gpu-DATE.md
    python benchmarks/gpu.py --contenders strategies --works small,resnet50,vgg19,vit-b16
    python benchmarks/gpu.py --contenders ours,seed,limit --works families

The second command compares the strategies of Paceline in a group of one rank: `ddp` exchanges gradients through NCCL
inside of recorded steps, `ddp-plain` neither records nor compiles; `torch-ddp` is torch's DDP in a bare loop. The third
trains ten model families of torchvision and timm.

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
ALSO = ("torch-ddp",)  # measured on request
# Ways to train with Paceline, and their flags.
OURS = {
    "ours": (),
    "ddp": ("--strategy=ddp",),
    "ddp-plain": ("--strategy=ddp", "--compile=never"),
    "exact": ("--exact", "--lanes=1"),
    "fsdp": ("--strategy=fsdp",),
}


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
    "vit-b16": Work("ViT-B/16 at 224x224, batch 256", "cifar10-vgg19", "vit-b16", 256, 2, 12_800),
    "resnet50": Work("ResNet-50 at 224x224, batch 256", "cifar10-vgg19", "resnet50", 256, 2, 12_800),
}
FAMILIES = (
    "torchvision:resnet50",
    "torchvision:convnext_tiny",
    "torchvision:densenet121",
    "torchvision:efficientnet_v2_s",
    "torchvision:mobilenet_v3_large",
    "torchvision:regnet_y_8gf",
    "torchvision:swin_t",
    "torchvision:vit_b_16",
    "timm:resnet50d",
    "timm:deit3_small_patch16_224",
)
WORKS |= {name: Work(f"{name} at 224x224, batch 256", "cifar10-vgg19", name, 256, 2, 12_800) for name in FAMILIES}
GROUPS = {
    "peers": ("vgg19", "resnet18-512", "resnet18-1024"),
    "small": ("resnet18-512", "resnet18-1024"),
    "families": FAMILIES,
}


def chosen_works(names: str) -> list[Work]:
    return [WORKS[name] for part in names.split(",") for name in GROUPS.get(part, (part,))]


def flags_of(work: Work, contender: str) -> list[str]:
    flags = [f"--model-name={work.model}", f"--epochs={work.epochs}", f"--global-batch-size={work.batch}"]
    if work.model != "vgg19":
        flags.append("--dropout=0")
    return [*flags, "--weights=none", "--compile=always", "--processes=1", *OURS[contender]]


def run_ours(work: Work, contender: str, data_dir: str) -> float:
    """The median over the epochs after the first, of a complete run."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags_of(work, contender), f"--output-dir={folder}/run", f"--data-dir={data_dir}"]
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
    measured = {name for rates in found.values() for name in rates}
    names = [name for name in (*OURS, *ALSO, *PEERS) if name in measured]
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
    parser.add_argument("--works", default="peers", help=f"groups ({', '.join(GROUPS)}) or any of: {', '.join(WORKS)}")
    parser.add_argument("--contenders", default=",".join(("ours", *PEERS)))
    parser.add_argument("--output")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU, and there is none; for CPUs: make bench-cpu")
    contenders = [*OURS, *ALSO, "limit"] if given.contenders == "strategies" else given.contenders.split(",")
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(given.rounds):
        for work in chosen_works(given.works):
            for name in contenders:
                if name == "limit" and number:
                    continue
                if name in OURS:
                    rate = run_ours(work, name, given.data_dir)
                else:
                    rate = run_peer(name, work, given.data_dir, given.steps)
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
