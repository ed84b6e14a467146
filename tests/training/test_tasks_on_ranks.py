"""Losses, tasks, sampling and teachers under `--exact`: one result on 1 and 2 ranks, and after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.ranks import run_ranks
from harness.runs import read_results, step_losses, train_in

SMALL = ("--model-name", "cnn", "--augment", "none", "--global-batch-size", "32", "--test-batch-size", "7")
EXACT = ("--exact", "--lanes", "2")
RARE = ("--dataset", "harness.task_data:rare_classes")
CASES = {
    "weighted cross entropy": (*RARE, "--class-weights", "balanced", "--label-smoothing", "0.1"),
    "weighted focal loss": (*RARE, "--loss", "focal", "--class-weights", "1", "2", "0.5", "0", "3", "1", "1"),
    "bce with mixup": (*RARE, "--loss", "bce", "--bce-threshold", "0.2", "--mixup-alpha", "0.4"),
    "balanced sampling": (*RARE, "--sampling", "balanced", "--epoch-samples", "192", "--augment", "light"),
    "weighted sampling": (*RARE, "--sampling", "weighted", "--epoch-samples", "96", "--best-by", "balanced_accuracy"),
    "several labels": ("--dataset", "harness.task_data:several_labels", "--task", "multi-label"),
    "regression": ("--dataset", "harness.task_data:numbers", "--task", "regression", "--loss", "huber"),
}


def answer(folder: Path) -> dict[str, Any]:
    """The results of a run that must not depend on the number of ranks."""
    results = read_results(folder)
    names = ("weights_sha256", "optimizer_sha256", "test_loss", "test_accuracy", "test_metrics", "best_epoch")
    return {name: results[name] for name in (*names, "best_value", "test")}


@pytest.mark.parametrize("case", CASES)
def test_one_and_two_ranks_and_a_resumed_run_are_equal(tmp_path: Path, case: str) -> None:
    flags = (*SMALL, *EXACT, *CASES[case])
    for size in (1, 2):
        run_ranks(size, train_in, str(tmp_path / str(size)), flags)
    assert answer(tmp_path / "1") == answer(tmp_path / "2")
    assert step_losses(tmp_path / "1") == step_losses(tmp_path / "2")
    stopped = str(tmp_path / "stopped")
    run_ranks(2, train_in, stopped, (*flags, "--max-steps", "3"))
    run_ranks(1, train_in, stopped, flags, True)
    assert answer(tmp_path / "stopped") == answer(tmp_path / "1")


@pytest.mark.parametrize("flags", [("--accumulate", "4"), ()])
def test_a_weighted_mean_is_the_same_on_all_ranks_and_microbatches(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Without --exact the last bits differ. A wrong denominator would change much more."""
    common = (*SMALL, *CASES["weighted cross entropy"], "--max-steps", "3")
    run_ranks(1, train_in, str(tmp_path / "one"), common)
    run_ranks(4, train_in, str(tmp_path / "four"), (*common, *flags, "--global-batch-size", "32"))
    assert step_losses(tmp_path / "four") == pytest.approx(step_losses(tmp_path / "one"), rel=1e-5)
