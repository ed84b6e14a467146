"""A run that was stopped and resumed ends where the undisturbed one ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from harness.ranks import run_ranks
from harness.runs import read_results, step_losses, train_in

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


def metrics_without_time(folder: Path) -> list[str]:
    lines = (folder / "metrics.csv").read_text().splitlines()
    return [line.rpartition(",")[0] for line in lines]


@pytest.mark.parametrize(
    ("strategy", "optimizer", "stop"),
    [("ddp", "sgd", 4), ("ddp", "adamw", 13), ("fsdp", "sgd", 13), ("fsdp", "adamw", 9)],
)
def test_same_world_same_bits(tmp_path: Path, strategy: str, optimizer: str, stop: int) -> None:
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


def test_three_ranks_and_batchnorm_same_bits(tmp_path: Path) -> None:
    # Three ranks: sums depend on how DDP arranges its buckets. BatchNorm: ranks have statistics of their own.
    flags = ("--model-name", "harness.batchnorm_model:build", "--global-batch-size", "63", "--ema-decay", "0.9")
    run_ranks(3, train_in, str(tmp_path / "whole"), flags)
    halves = str(tmp_path / "halves")
    run_ranks(3, train_in, halves, (*flags, "--max-steps", "4"))
    run_ranks(3, train_in, halves, flags, True)
    assert state_of(tmp_path / "halves") == state_of(tmp_path / "whole")
    assert step_losses(tmp_path / "halves") == step_losses(tmp_path / "whole")
