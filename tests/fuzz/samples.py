"""Valid files to mutate, made once by the code that writes them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from paceline.launch.job_record import JobRecord
from paceline.runs.folder import RunFolder
from paceline.runs.notes import Notes, write_notes
from paceline.runs.stores import MirrorNote

_TRAIN = ("--num-samples", "64", "--epochs", "2", "--global-batch-size", "16", "--log-frequency", "1", "--track")
_SMALL = ("--model-name", "mlp", "--hidden-size", "4", "--test-batch-size", "500", "--processes", "1")


def make_samples(root: Path) -> None:
    """Two finished runs, one of them after a failure: `runs/one` and `runs/two`."""
    failure = ("--inject", "raise step=2", "--save-steps", "2", "--ema-decay", "0.9", "--optimizer", "adamw")
    _train(root, "one", *failure)
    _train(root, "two", "--seed", "5", "--ema-decay", "0.9", "--optimizer", "adamw")
    _add_what_clusters_leave(RunFolder(root / "runs" / "one"))


def _train(root: Path, name: str, *flags: str) -> None:
    command = ("train", "shapes-cnn", *_TRAIN, *_SMALL, "--output-dir", f"runs/{name}", *flags)
    subprocess.run([sys.executable, "-m", "paceline", *command], cwd=root, check=True, capture_output=True, timeout=300)


def _add_what_clusters_leave(folder: RunFolder) -> None:
    """Files of a run with tags, a store and Slurm, created without a store and Slurm."""
    write_notes(folder.path, Notes(("good", "keep"), "the one for the paper"))
    MirrorNote("s3://bucket/run", token="t", says="in step 8").write(folder.path)
    record = JobRecord("123", "", str(folder.path / "job.sbatch"), ["paceline", "train"], earlier=["99"])
    record.write(folder.path)
    (folder.path / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --job-name=one\n")
    folder.requeues.write_text("".join(json.dumps({"job": "123", "step": n, "time": 1.5}) + "\n" for n in (4, 4)))


def copy_runs(samples: Path, folder: Path) -> None:
    shutil.copytree(samples / "runs", folder / "runs", symlinks=True)
