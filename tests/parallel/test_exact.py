"""`--exact`: the same bits on 1, 2 and 4 ranks, for all settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.ranks import run_ranks
from harness.runs import read_results, step_losses, train_in

EXACT = ("--exact", "--lanes", "4", "--model-name", "harness.batchnorm_model:build")


def metrics_without_time(folder: Path) -> list[str]:
    return [line.rpartition(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()]


def hashes(folder: Path) -> tuple[Any, Any]:
    results = read_results(folder)
    return results["weights_sha256"], results["optimizer_sha256"]


@pytest.mark.parametrize(
    "flags",
    [
        ("--optimizer", "adamw", "--base-lr", "0.01", "--clip-norm", "0.5", "--ema-decay", "0.9"),
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(
            ("--accumulate", "2", "--amp-dtype", "bf16", "--label-smoothing", "0.1", "--max-steps", "5"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--model-name", "cnn", "--dropout", "0.3", "--optimizer", "nesterov", "--cutout", "8", "--max-steps", "6"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_two_and_four_ranks_end_with_the_same_bits(tmp_path: Path, flags: tuple[str, ...]) -> None:
    folders = {size: tmp_path / f"ranks-{size}" for size in (1, 2, 4)}
    for size, folder in folders.items():
        run_ranks(size, train_in, str(folder), (*EXACT, *flags))
    assert len({hashes(folder) for folder in folders.values()}) == 1
    assert step_losses(folders[1]) == step_losses(folders[2]) == step_losses(folders[4])
    assert metrics_without_time(folders[1]) == metrics_without_time(folders[2]) == metrics_without_time(folders[4])


def test_without_exact_the_bits_differ(tmp_path: Path) -> None:
    # Otherwise the test above would prove nothing.
    for size in (1, 2):
        run_ranks(size, train_in, str(tmp_path / str(size)), EXACT[3:])
    assert step_losses(tmp_path / "1") != step_losses(tmp_path / "2")


def test_another_number_of_lanes_gives_other_bits(tmp_path: Path) -> None:
    for lanes in ("2", "4"):
        run_ranks(1, train_in, str(tmp_path / lanes), ("--exact", "--lanes", lanes, *EXACT[3:], "--max-steps", "4"))
    assert hashes(tmp_path / "2") != hashes(tmp_path / "4")


@pytest.mark.long
def test_changing_the_world_size_changes_no_bit(tmp_path: Path) -> None:
    run_ranks(1, train_in, str(tmp_path / "whole"), EXACT)
    moved = str(tmp_path / "moved")
    for number, (size, stop) in enumerate([(4, 4), (2, 9), (1, 13), (4, 18)]):
        run_ranks(size, train_in, moved, (*EXACT, "--max-steps", str(stop)), number > 0)
    assert hashes(tmp_path / "moved") == hashes(tmp_path / "whole")
    assert metrics_without_time(tmp_path / "moved") == metrics_without_time(tmp_path / "whole")
