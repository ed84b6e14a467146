"""An exact run that is killed and resumed with other world sizes has the result of an undisturbed run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from harness import batchnorm_model
from harness.cli import paceline
from harness.processes import kill_all_in, started
from harness.runs import read_results
from paceline.checkpoints.store import open_checkpoint

QUICK = [
    *("train", "shapes-cnn", "--num-samples=640", "--global-batch-size=64", "--epochs=2", "--log-frequency=1"),
    *("--track", "--save-steps=2", "--output-dir=run"),
]


def outcome(folder: Path) -> dict[str, object]:
    results = read_results(folder)
    lines = (folder / "metrics.csv").read_text().splitlines()
    hashes = {name: results.get(name) for name in ("weights_sha256", "optimizer_sha256", "test_loss", "steps")}
    return {**hashes, "metrics": [line.rpartition(",")[0] for line in lines]}


def kill_at_step(arguments: list[str], cwd: Path, step: int, delay_s: float) -> int:
    """Start a run and kill all its processes soon after a step. Returns the number of killed processes."""
    with started(*arguments, cwd=cwd) as run:
        run.wait_for(f"step {step}/")
        time.sleep(delay_s)  # not a synchronisation: this is the random time
        return kill_all_in(cwd)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_exact_with_a_kill_at_each_change_of_the_world_size(tmp_path: Path) -> None:
    model = batchnorm_model.__file__
    flags = [*QUICK, "--exact", "--lanes=4", f"--model-name={model}:build"]
    for name in ("whole", "moved"):
        (tmp_path / name).mkdir()
    answer = paceline(*flags, "--processes=1", cwd=tmp_path / "whole")
    assert answer.code == 0, answer
    resumed_at = []
    for processes, step in ((4, 4), (2, 9), (1, 13)):
        killed = kill_at_step(
            [*flags, f"--processes={processes}", "--resume=auto"], tmp_path / "moved", step, delay_s=0.02
        )
        assert killed >= processes
        resumed_at.append(open_checkpoint(tmp_path / "moved" / "run" / "checkpoints" / "latest").step)
    answer = paceline(*flags, "--processes=4", "--resume=auto", cwd=tmp_path / "moved")
    assert answer.code == 0, answer
    assert resumed_at == sorted(set(resumed_at))  # each attempt made progress
    assert outcome(tmp_path / "moved" / "run") == outcome(tmp_path / "whole" / "run")
    assert read_results(tmp_path / "moved" / "run")["optimizer_sha256"]
