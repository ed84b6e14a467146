"""Pipelines of examples/runnable, run like a user runs them, once for all test files.

`base` is the session's temporary folder.
"""

from __future__ import annotations

import functools
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.cli import Answer, command, paceline

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "runnable"
# 10 steps of 32 samples on two ranks, with a checkpoint every two steps.
TINY = """\
recipe: synthetic-mlp
world_size: 2
epochs: 2
batch_size: 16
learning_rate: 0.004
hidden_size: 16
input_size: 12
num_classes: 3
num_samples: 200
train_split: 0.8
exact: true
save_steps: 2
log_frequency: 1
keep_every_epochs: 2
"""
# The same settings for `paceline train`: the batch of both ranks, and the learning rate for 256 samples.
TINY_FLAGS = (
    *("synthetic-mlp", "--epochs=2", "--global-batch-size=32", "--base-lr=0.032", "--hidden-size=16"),
    *("--input-size=12", "--num-classes=3", "--num-samples=200", "--train-split=0.8", "--exact"),
    *("--save-steps=2", "--log-frequency=1", "--keep-every-epochs=2"),
)
STEPS = 10


@dataclass(frozen=True)
class Pipeline:
    """The results of one start of the pipeline."""

    home: Path
    run_id: str
    answer: Answer

    @property
    def folder(self) -> Path:
        return self.home / "runs" / self.run_id

    @property
    def catalog(self) -> Path:
        return self.home / ".catalog" / self.run_id / "runs" / self.run_id / "artifacts"

    @property
    def run_log(self) -> Path:
        return self.home / ".run_log_store" / f"{self.run_id}.json"


def copy_example(home: Path) -> Path:
    shutil.copytree(EXAMPLE, home, dirs_exist_ok=True)
    (home / "tiny.yaml").write_text(TINY)
    return home


def start_pipeline(home: Path, run_id: str, **environment: str) -> Pipeline:
    """Run in a separate process. Runnable's dependencies warn, so warnings are not errors there."""
    clean = {"PYTHONWARNINGS": "default", "RUNNABLE_PARAMETERS_FILE": "tiny.yaml", "RUNNABLE_RUN_ID": run_id}
    answer = command(sys.executable, "pipeline.py", cwd=home, env={**clean, **environment})
    return Pipeline(home, run_id, answer)


@functools.cache
def undisturbed_pipeline(base: Path) -> Pipeline:
    """The file doubles the batch size and the environment sets it back. The environment has priority."""
    home = copy_example(base / "runnable-undisturbed")
    (home / "tiny.yaml").write_text(TINY.replace("batch_size: 16", "batch_size: 32"))
    pipeline = start_pipeline(home, "undisturbed", RUNNABLE_PRM_BATCH_SIZE="16")
    assert pipeline.answer.code == 0, pipeline.answer.out[-3000:] + pipeline.answer.err
    return pipeline


@functools.cache
def plain_training(base: Path) -> Path:
    """Run `paceline train` with its own launcher. Returns the run folder."""
    home = base / "runnable-plain"
    home.mkdir()
    answer = paceline("train", *TINY_FLAGS, "--processes", "2", "--output-dir", "run", cwd=home)
    assert answer.code == 0, answer.out + answer.err
    return home / "run"
