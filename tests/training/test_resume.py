"""A stopped and resumed run has the result of the undisturbed run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from unittest import mock

import pytest
from safetensors.torch import load_file

from harness.ranks import make_world, run_ranks
from harness.runs import read_results, step_losses, train_in
from paceline.training import components as components

EVERYTHING = ("--ema-decay", "0.9", "--clip-norm", "1", "--dropout", "0.3", "--warmup-epochs", "0.5")


def state_of(folder: Path) -> dict[str, object]:
    """Every tensor of the latest checkpoint and its state, without wall-clock times."""
    path = folder / "checkpoints" / "latest"
    state = json.loads((path / "state.json").read_text())
    del state["epoch_sums"]["seconds"], state["config"]["max_steps"]
    tensors = {
        f"{file.stem}:{name}": value.tolist()
        for file in sorted(path.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    assert any(name.startswith("optimizer") for name in tensors)
    assert any(name.startswith("ema") for name in tensors)
    return {**state, **tensors}


def test_a_checkpoint_with_other_random_numbers_gives_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run resumes from it, with a warning. A run without dropout needs no warning."""
    for dropout, warned in (("0.3", True), ("0", False)):
        folder, flags = tmp_path / dropout, ("--dropout", dropout, "--max-steps")
        train_in(make_world(0, 1), str(folder), (*flags, "2"))
        train_in(make_world(0, 1), str(folder), (*flags, "3"), True)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        with mock.patch.object(components, "RANDOM_NUMBERS", 3):
            train_in(make_world(0, 1), str(folder), (*flags, "4"), True)
        warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert ["dropout" in text for text in warnings] == [True] * warned
        caplog.clear()


def metrics_without_time(folder: Path) -> list[str]:
    lines = (folder / "metrics.csv").read_text().splitlines()
    return [line.rpartition(",")[0] for line in lines]


@pytest.mark.parametrize(
    ("strategy", "optimizer", "stop"),
    [
        ("ddp", "sgd", 4),
        pytest.param("ddp", "adamw", 13, marks=pytest.mark.long),
        pytest.param("fsdp", "sgd", 13, marks=pytest.mark.long),
        pytest.param("fsdp", "adamw", 9, marks=pytest.mark.long),
    ],
)
def test_the_same_world_size_gives_the_same_bits(tmp_path: Path, strategy: str, optimizer: str, stop: int) -> None:
    flags = ("--strategy", strategy, "--optimizer", optimizer, "--base-lr", "0.01", *EVERYTHING)
    run_ranks(2, train_in, str(tmp_path / "whole"), flags)
    halves = str(tmp_path / "halves")
    run_ranks(2, train_in, halves, (*flags, "--max-steps", str(stop)))
    run_ranks(2, train_in, halves, flags, True)
    assert state_of(tmp_path / "halves") == state_of(tmp_path / "whole")
    assert metrics_without_time(tmp_path / "halves") == metrics_without_time(tmp_path / "whole")
    assert step_losses(tmp_path / "halves") == step_losses(tmp_path / "whole")
    hashes = {read_results(tmp_path / name)["weights_sha256"] for name in ("whole", "halves")}
    assert len(hashes) == 1


def test_three_ranks_with_batchnorm_give_the_same_bits(tmp_path: Path) -> None:
    # Three ranks: sums depend on DDP's buckets. BatchNorm: ranks have separate statistics.
    flags = ("--model-name", "harness.batchnorm_model:build", "--global-batch-size", "63", "--ema-decay", "0.9")
    run_ranks(3, train_in, str(tmp_path / "whole"), flags)
    halves = str(tmp_path / "halves")
    run_ranks(3, train_in, halves, (*flags, "--max-steps", "4"))
    run_ranks(3, train_in, halves, flags, True)
    assert state_of(tmp_path / "halves") == state_of(tmp_path / "whole")
    assert step_losses(tmp_path / "halves") == step_losses(tmp_path / "whole")
