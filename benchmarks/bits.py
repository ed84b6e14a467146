"""Compare two checkouts of Paceline: do eight runs end with bit-identical weights?

    python benchmarks/bits.py BEFORE/.venv/bin/python AFTER/.venv/bin/python

For changes that must not change results. Exit code 1 if a run differs. Bits depend on the processor and on torch, so
both checkouts run now on the same machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from reliability import describe_machine

SMALL = ("--dataset=synthetic", "--num-samples=512", "--global-batch-size=64", "--epochs=2", "--track")
PICTURES = (*SMALL, "--input-size=3x32x32", "--augment=light", "--warmup-epochs=0.2")


@dataclass(frozen=True)
class Case:
    """A run: recipe, flags, and the step at which it is stopped and resumed."""

    name: str
    recipe: str
    flags: tuple[str, ...]
    stop_step: int | None = None


CASES = (
    Case("CNN, 1 rank", "cifar10-cnn", (*PICTURES, "--processes=1")),
    Case("CNN, 2 ranks, DDP, resumed", "cifar10-cnn", (*PICTURES, "--processes=2", "--strategy=ddp"), 5),
    Case("CNN, 2 ranks, exact", "cifar10-cnn", (*PICTURES, "--processes=2", "--exact", "--lanes=4")),
    Case("MLP, 2 ranks, DDP", "synthetic-mlp", ("--num-samples=2000", "--epochs=2", "--track", "--processes=2")),
    Case("MLP, 2 ranks, FSDP", "synthetic-mlp", ("--num-samples=2000", "--track", "--processes=2", "--strategy=fsdp")),
    Case("ResNet-18, 1 rank", "cifar10-resnet18", (*PICTURES, "--processes=1")),
    Case("ResNet-18, 2 ranks, FSDP, resumed", "cifar10-resnet18", (*PICTURES, "--processes=2", "--strategy=fsdp"), 5),
    Case("VGG-11, 2 ranks, DDP", "cifar10-cnn", (*PICTURES, "--model-name=vgg11", "--processes=2", "--max-steps=4")),
)


def weights_after(python: str, case: Case, folder: Path) -> str:
    command = [python, "-m", "paceline", "train", case.recipe, *case.flags, "--output-dir=run"]
    starts = [[]] if case.stop_step is None else [[f"--max-steps={case.stop_step}"], ["--resume=auto"]]
    for more in starts:
        done = subprocess.run([*command, *more], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join([*command, *more])} ended with {done.returncode}:\n{done.stderr}")
    return str(json.loads((folder / "run" / "results.json").read_text())["weights_sha256"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=lambda path: str(Path(path).absolute()))
    parser.add_argument("after", type=lambda path: str(Path(path).absolute()))
    options = parser.parse_args()
    print("| run | before | after | |\n|---|---|---|---|")
    differ = 0
    for case in CASES:
        found = []
        for python in (options.before, options.after):
            with tempfile.TemporaryDirectory() as folder:
                found.append(weights_after(python, case, Path(folder)))
        differ += found[0] != found[1]
        verdict = "equal" if found[0] == found[1] else "DIFFERENT"
        print(f"| {case.name} | {found[0][:16]} | {found[1][:16]} | {verdict} |", flush=True)
    print(f"\n{describe_machine()}.")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
