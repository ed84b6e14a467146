"""Tiny ImageNet on one GPU: Paceline and timm's train.py with the same recipe, side by side.

    python benchmarks/tiny_imagenet.py tiny-imagenet-200 --timm-train pytorch-image-models/train.py
    python benchmarks/tiny_imagenet.py tiny-imagenet-200 --parts full        # only the 100 epochs of the shipped recipe

`tiny-imagenet-200` is the published archive, unpacked. pip does not install timm's train.py: clone timm at the
installed version. Needs a GPU and timm. Three parts:

compare  both sides train timm's resnet18 for 30 epochs, in turn, with the same settings and seeds. Both validate on
         the 10,000 validation pictures after each epoch. The clock is this process's: it watches the file in which
         each side records its epochs, and counts from the end of the first epoch to the end of the last. So starting
         and compiling do not count, and validation does. The accuracy is that of the last epoch.
cost     Paceline's images/s with mixup, CutMix, RandAugment and erasing, and with crops and flips alone.
full     the recipe tiny-imagenet-resnet18 as shipped (100 epochs), once for each seed.

Paceline reads packed pictures; the time to pack them is printed. Prints a table in Markdown and results.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PARTS = ("compare", "cost", "full")
SIDE, CLASSES, BATCH, LR = 64, 200, 256, 0.1
_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t for the mean of so many values
_TICK_S = 0.05


@dataclass(frozen=True)
class Measured:
    accuracy: float  # of the last epoch, 0 to 1
    images_per_s: float


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder tiny-imagenet-200")
    parser.add_argument("--timm-train", type=Path, help="timm's train.py, for the part compare")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=30, help="of the part compare")
    parser.add_argument("--workers", type=int, default=8, help="processes of timm, threads of Paceline")
    parser.add_argument("--output", type=Path, default=Path("tiny-imagenet-benchmark"))
    given = parser.parse_args(arguments)
    if given.epochs < 2:
        parser.error("--epochs: at least 2, because the first one is not counted")
    if "compare" in given.parts and given.timm_train is None:
        parser.error("the part compare needs --timm-train")
    return given


def missing(given: argparse.Namespace, has_gpu: Callable[[], bool]) -> str:
    """What is missing, in one line; empty: nothing."""
    if not has_gpu():
        return "this benchmark needs a GPU"
    if find_spec("timm") is None:
        return "this benchmark needs timm: pip install 'paceline[timm]'"
    if given.timm_train is not None and not given.timm_train.is_file():
        return f"there is no {given.timm_train}"
    if not (given.data / "val" / "val_annotations.txt").is_file():
        return f"{given.data} is not the published tiny-imagenet-200: it has no val/val_annotations.txt"
    return ""


def arrange(data: Path, target: Path) -> None:
    """train/WNID and val/WNID with links to the pictures, and test, which is val. Both trainers read this layout."""
    if target.exists():
        return
    draft = target.with_name(f"{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    for folder in sorted((data / "train").iterdir()):
        link_into(draft / "train" / folder.name, sorted((folder / "images").iterdir()))
    lines = (data / "val" / "val_annotations.txt").read_text().splitlines()
    by_class: dict[str, list[Path]] = {}
    for name, wnid, *_ in (line.split("\t") for line in lines):
        by_class.setdefault(wnid, []).append(data / "val" / "images" / name)
    for wnid, pictures in sorted(by_class.items()):
        for part in ("val", "test"):
            link_into(draft / part / wnid, pictures)
    draft.rename(target)


def link_into(folder: Path, pictures: Sequence[Path]) -> None:
    folder.mkdir(parents=True)
    for picture in pictures:
        (folder / picture.name).symlink_to(picture.resolve())


def timm_command(given: argparse.Namespace, data: Path, seed: int) -> list[str]:
    return [
        *(sys.executable, str(given.timm_train), "--data-dir", str(data), "--train-split", "train"),
        *("--val-split", "val", "--model", "resnet18", "--num-classes", str(CLASSES), "--img-size", str(SIDE)),
        *("--batch-size", str(BATCH), "--epochs", str(given.epochs), "--seed", str(seed)),
        *("--workers", str(given.workers)),
        *("--opt", "nesterov", "--lr", str(LR), "--momentum", "0.9", "--weight-decay", "5e-4"),
        *("--sched", "cosine", "--warmup-epochs", "3", "--min-lr", "0", "--smoothing", "0.1"),
        *("--scale", "0.25", "1", "--crop-pct", "0.875"),
        *("--train-interpolation", "bilinear", "--interpolation", "bilinear"),
        *("--aa", "rand-m9-n2-mstd0", "--reprob", "0.25", "--color-jitter", "0", "--mixup", "0.2", "--cutmix", "1"),
        *("--amp", "--amp-dtype", "bfloat16", "--channels-last", "--pin-mem", "--checkpoint-hist", "1"),
        *("--output", str(given.output / "timm"), "--experiment", f"seed-{seed}"),
    ]  # fmt: skip


def paceline_command(
    given: argparse.Namespace, data: Path, name: str, seed: int, epochs: int, *, is_augmented: bool = True
) -> list[str]:
    heavy = ("--policy=randaugment", "--policy-ops=2", "--policy-magnitude=9", "--erase=0.25")
    mixed = ("--mixup-alpha=0.2", "--cutmix-alpha=1")
    return [
        *(sys.executable, "-m", "paceline", "train", "tiny-imagenet-resnet18", f"--data-dir={data}", f"--seed={seed}"),
        *("--model-name=timm:resnet18", f"--epochs={epochs}", f"--base-lr={LR}", "--warmup-epochs=3"),
        *("--decay-norms-and-biases", "--label-smoothing=0.1", f"--global-batch-size={BATCH}"),
        *("--processes=1", f"--num-workers={given.workers}", "--track"),
        f"--output-dir={given.output / 'paceline' / name}",
        *((*heavy, *mixed) if is_augmented else ("--cutmix-alpha=0",)),
    ]  # fmt: skip


def full_command(given: argparse.Namespace, data: Path, seed: int) -> list[str]:
    return [
        *(sys.executable, "-m", "paceline", "train", "tiny-imagenet-resnet18", f"--data-dir={data}", f"--seed={seed}"),
        *("--processes=1", "--track", f"--output-dir={given.output / 'paceline' / f'full-{seed}'}"),
    ]


def timm_epochs(folder: Path) -> list[float]:
    """The accuracy of each finished epoch."""
    file = folder / "summary.csv"
    if not file.is_file():
        return []
    return [float(row["eval_top1"]) / 100 for row in csv.DictReader(file.read_text().splitlines()) if row["eval_top1"]]


def paceline_epochs(folder: Path) -> list[float]:
    file = folder / "metrics.csv"
    if not file.is_file():
        return []
    rows = csv.DictReader(file.read_text().splitlines())
    return [float(row["accuracy"]) for row in rows if row["phase"] == "val" and row["accuracy"]]


def watch(command: list[str], folder: Path, read: Callable[[Path], list[float]], images: int) -> Measured:
    """Run a trainer, and note with one clock when its record of epochs grows. `images`: of an epoch."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.parent / f"{folder.name}.log"
    ends: list[float] = []
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        while True:
            code = process.poll()
            now = time.monotonic()
            ends += [now] * (len(read(folder)) - len(ends))
            if code is not None:
                break
            time.sleep(_TICK_S)
    if code != 0 or len(ends) < 2:
        raise SystemExit(f"{command[1]} ended with code {code} after {len(ends)} epochs; see {log}")
    return Measured(read(folder)[-1], images * (len(ends) - 1) / (ends[-1] - ends[0]))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval (0 for one value)."""
    if len(values) < 2:
        return values[0], 0.0
    factor = _T_95.get(len(values), 2.262)
    return statistics.mean(values), factor * statistics.stdev(values) / len(values) ** 0.5


def row(name: str, found: Sequence[Measured]) -> str:
    accuracy, wide = interval([one.accuracy for one in found])
    speed, spread = interval([one.images_per_s for one in found])
    return f"| {name} | {accuracy:.2%} ± {wide:.2%} | {speed:,.0f} ± {spread:,.0f} | {len(found)} |"


def count_pictures(data: Path) -> int:
    return sum(1 for folder in (data / "train").iterdir() for _ in folder.iterdir())


def measure(given: argparse.Namespace) -> dict[str, list[Measured]]:
    data, packed = given.output / "arranged", given.output / "packed"
    given.output.mkdir(parents=True, exist_ok=True)
    arrange(given.data, data)
    began = time.monotonic()
    pack = [sys.executable, "-m", "paceline", "data", "pack", str(data), str(packed), "--image-size", str(SIDE)]
    subprocess.run(pack, check=True)
    print(f"packed in {time.monotonic() - began:.1f} s")
    images = count_pictures(data)
    found: dict[str, list[Measured]] = {}

    def add(name: str, command: list[str], folder: Path, read: Callable[[Path], list[float]]) -> None:
        found.setdefault(name, []).append(watch(command, folder, read, images))
        print(row(name, found[name][-1:]), flush=True)

    ours = given.output / "paceline"
    for seed in given.seeds if "compare" in given.parts else ():
        add("timm", timm_command(given, data, seed), given.output / "timm" / f"seed-{seed}", timm_epochs)
        command = paceline_command(given, packed, f"seed-{seed}", seed, given.epochs)
        add("Paceline", command, ours / f"seed-{seed}", paceline_epochs)
    for seed in given.seeds if "cost" in given.parts else ():
        for name, is_augmented in (("everything", True), ("crops and flips", False)):
            folder = f"cost-{seed}-{is_augmented}"
            command = paceline_command(given, packed, folder, seed, 5, is_augmented=is_augmented)
            add(f"Paceline, {name}, 5 epochs", command, ours / folder, paceline_epochs)
    for seed in given.seeds if "full" in given.parts else ():
        add("Paceline, shipped recipe", full_command(given, packed, seed), ours / f"full-{seed}", paceline_epochs)
    return found


def machine() -> dict[str, Any]:
    import timm
    import torch

    import paceline

    return {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"paceline": paceline.__version__, "torch": torch.__version__, "timm": timm.__version__},
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
    }


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    given = parse()
    if lack := missing(given, has_gpu):
        raise SystemExit(lack)
    found = measure(given)
    about = machine()
    rows = {name: [vars(one) for one in values] for name, values in found.items()}
    (given.output / "results.json").write_text(json.dumps({**about, "measured": rows}, indent=2))
    print(f"\n{about['gpu']}, {about['versions']}, {about['date']}: `{about['command']}`\n")
    print("| | top-1 of the last epoch | images/s with validation | seeds |\n|---|---|---|---|")
    for name, values in found.items():
        print(row(name, values))


if __name__ == "__main__":
    main()
