"""Complete training runs, as described in the README and the headers of the recipes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.cli import command, paceline
from harness.runs import read_results, step_losses
from harness.shared_data import real_cifar10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_default_recipe_learns_the_shapes_in_time(tmp_path: Path) -> None:
    answer = paceline("train", cwd=tmp_path, timeout_s=300)
    assert answer.code == 0, answer
    (folder,) = (tmp_path / "runs").iterdir()
    results = read_results(folder)
    assert results["test_accuracy"] > 0.97
    assert results["training_seconds"] < 120
    assert f"everything is in runs/{folder.name}" in answer.out


def test_synthetic_mlp_learns(tmp_path: Path) -> None:
    answer = paceline("train", "synthetic-mlp", "--world-size", "4", "--output-dir", "run", cwd=tmp_path, timeout_s=300)
    assert answer.code == 0, answer
    results = read_results(tmp_path / "run")
    assert results["test_accuracy"] > 0.9
    assert len(results["process_metrics"]) == 4


@pytest.mark.shared
def test_cifar10_cnn_reaches_the_accuracy_of_the_course(tmp_path: Path) -> None:
    data = str(real_cifar10())
    answer = paceline(
        *("train", "cifar10-cnn", "--data-dir", data, "--processes", "2", "--output-dir", "run"),
        cwd=tmp_path,
        timeout_s=800,
    )
    assert answer.code == 0, answer
    assert read_results(tmp_path / "run")["test_accuracy"] >= 0.70


@pytest.mark.shared
def test_torchrun_gives_the_same_losses_on_real_cifar10(tmp_path: Path) -> None:
    flags = [
        "train",
        "cifar10-cnn",
        "--data-dir",
        str(real_cifar10()),
        "--max-steps",
        "60",
        "--log-frequency",
        "1",
    ]
    own = paceline(*flags, "--processes", "2", "--output-dir", "own", cwd=tmp_path, timeout_s=300)
    joined = command(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "paceline", *flags, "--output-dir", "joined"),
        cwd=tmp_path,
        timeout_s=300,
    )
    sharded = paceline(
        *flags, "--processes", "2", "--strategy", "fsdp", "--output-dir", "fsdp", cwd=tmp_path, timeout_s=300
    )
    assert (own.code, joined.code, sharded.code) == (0, 0, 0), (own, joined, sharded)
    assert step_losses(tmp_path / "joined") == step_losses(tmp_path / "own")
    assert len(step_losses(tmp_path / "own")) == 60
    # Another order of additions. The difference grows with every step.
    assert step_losses(tmp_path / "fsdp")[:30] == pytest.approx(step_losses(tmp_path / "own")[:30], abs=1e-5)
