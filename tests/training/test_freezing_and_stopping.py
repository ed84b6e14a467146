"""Frozen layers, unfrozen layers, early stopping and clipping on real ranks, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.ranks import run_ranks
from harness.runs import read_results, train_in
from paceline.metrics.recorder import read_rows

MODEL = ("--model-name", "harness.batchnorm_model:build", "--train-split", "0.9")
EXACT = ("--exact", "--lanes", "2")
EVERYTHING = (
    *("--epochs", "3", "--clip-norm", "0", "--clip-agc", "0.02", "--layer-decay", "0.7", "--head-lr-factor", "3"),
    *("--no-decay-norms-and-biases", "--freeze", "0", "--unfreeze-at", "3"),
    *("--min-lr", "1e-4", "--cooldown-epochs", "1", "--warmup-epochs", "0.5", "--warmup-start-lr", "1e-3"),
    *("--ema-decay", "0.9", "--ema-warmup-epochs", "1"),
)


def hashes(folder: Path) -> tuple[Any, Any]:
    results = read_results(folder)
    return results["weights_sha256"], results["optimizer_sha256"]


def weights_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = sorted((folder / "checkpoints" / f"step-{step:08}").glob("model*.safetensors"))
    return {name: value for path in found for name, value in load_file(path).items()}


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_exact_runs_have_one_hash_on_one_and_two_ranks_and_after_a_resume(tmp_path: Path, optimizer: str) -> None:
    flags = (*MODEL, *EXACT, *EVERYTHING, "--optimizer", optimizer, "--base-lr", "0.01")
    for ranks in (1, 2):
        run_ranks(ranks, train_in, str(tmp_path / str(ranks)), flags)
    stopped = str(tmp_path / "stopped")
    for number, (ranks, stop) in enumerate([(2, 7), (1, 20), (2, 27)]):
        run_ranks(ranks, train_in, stopped, (*flags, "--max-steps", str(stop)), number > 0)
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2") == hashes(tmp_path / "stopped")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("clip", ["--clip-agc=0.02", "--clip-value=0.001"])
def test_two_ranks_train_like_one(tmp_path: Path, strategy: str, clip: str) -> None:
    flags: tuple[str, ...] = (*EVERYTHING, clip, "--clip-agc=0" if "value" in clip else clip, "--freeze", "features.0")
    flags = (*flags, "--optimizer", "lamb", "--base-lr", "0.01", "--seed", "1")
    run_ranks(1, train_in, str(tmp_path / "one"), flags)
    run_ranks(2, train_in, str(tmp_path / "two"), (*flags, "--strategy", strategy))
    one, two = (read_rows(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    losses = [[row["loss"] for row in rows if row["kind"] == "step"] for rows in (one, two)]
    norms = [[row["grad_norm"] for row in rows if row["kind"] == "step"] for rows in (one, two)]
    # Sums of floats in another order.
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "auto"), (2, "ddp"), (2, "fsdp")])
def test_frozen_layers_keep_their_weights_and_statistics(tmp_path: Path, ranks: int, strategy: str) -> None:
    flags = (*MODEL, "--freeze", "0", "1", "--keep-every-epochs", "1", "--strategy", strategy)
    run_ranks(ranks, train_in, str(tmp_path), (*flags, "--epochs", "2"))
    first, last = weights_at(tmp_path, 9), weights_at(tmp_path, 18)
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == {name for name in first if name.partition(".")[0] in ("0", "1")}


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "auto"), (2, "ddp"), (2, "fsdp")])
def test_layers_are_trained_from_the_epoch_that_unfreezes_them(tmp_path: Path, ranks: int, strategy: str) -> None:
    flags = (*MODEL, "--freeze", "0", "1", "--unfreeze-at", "3", "--keep-every-epochs", "1", "--strategy", strategy)
    run_ranks(ranks, train_in, str(tmp_path), (*flags, "--epochs", "3"))
    first, second, third = (weights_at(tmp_path, step) for step in (9, 18, 27))
    frozen = {name for name in first if name.partition(".")[0] in ("0", "1")}
    assert all(torch.equal(first[name], second[name]) for name in frozen)
    assert not any(torch.equal(second[name], third[name]) for name in frozen)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_without_progress_stops_early_and_is_finished(tmp_path: Path, ranks: int) -> None:
    flags = ("--stop-early", "2", "--epochs", "9", "--base-lr", "1e-30", "--schedule", "constant")
    run_ranks(ranks, train_in, str(tmp_path), flags)
    results = read_results(tmp_path)
    assert (results["steps"], results["best_epoch"]) == (27, 1)
    assert (tmp_path / "checkpoints" / "step-00000027").is_dir()
    # After another start there is nothing left to train, and the results are the same.
    run_ranks(ranks, train_in, str(tmp_path), flags, True)
    again = read_results(tmp_path)
    assert [again[name] for name in ("steps", "test_loss")] == [results[name] for name in ("steps", "test_loss")]


def test_early_stopping_counts_across_a_resume(tmp_path: Path) -> None:
    flags = ("--stop-early", "2", "--epochs", "9", "--base-lr", "1e-30", "--schedule", "constant")
    run_ranks(2, train_in, str(tmp_path), (*flags, "--max-steps", "22"))
    run_ranks(1, train_in, str(tmp_path), flags, True)
    assert read_results(tmp_path)["steps"] == 27
