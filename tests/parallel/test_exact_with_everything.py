"""A complete modern recipe under `--exact`: one hash on 1, 2 and 4 ranks, and after a kill and a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import paceline
from harness.ranks import run_ranks
from harness.runs import QUICK, read_results, step_losses, train_in

EVERYTHING = (
    *("--exact", "--lanes", "4", "--max-steps", "7", "--num-samples", "320", "--train-split", "0.8"),
    *("--augment", "resized-crop", "--image-size", "16", "--policy", "randaugment", "--policy-std", "0.5"),
    *("--color-jitter", "0.4", "--erase", "0.5", "--mixup-alpha", "0.4", "--cutmix-alpha", "1"),
    *("--repeat-augment", "2", "--label-smoothing", "0.1"),
    *("--model-name", "vit-ti16", "--model-args", "patch_size=4", "width=24", "depth=2", "heads=2", "drop_path=0.3"),
    *("--optimizer", "adamw", "--base-lr", "0.01", "--layer-decay", "0.7", "--no-decay-norms-and-biases"),
    *("--warmup-epochs", "0.5", "--clip-norm", "1", "--ema-decay", "0.9"),
)
KILL_STEP = 5


@pytest.mark.long
def test_one_hash_on_any_number_of_ranks_and_after_a_kill(tmp_path: Path) -> None:
    for ranks in (1, 2, 4):
        run_ranks(ranks, train_in, str(tmp_path / str(ranks)), EVERYTHING)
    killed = paceline(
        *("train", "shapes-cnn", *QUICK, *EVERYTHING, "--processes", "2", "--output-dir", "killed"),
        *("--save-steps", "2", "--inject", f"kill rank=1 step={KILL_STEP}"),
        cwd=tmp_path,
    )
    assert killed.code == 0, killed
    failures = [json.loads(line) for line in (tmp_path / "killed" / "failures.jsonl").read_text().splitlines()]
    assert [failure["rank"] for failure in failures] == [1]  # the fault has fired
    folders = [tmp_path / name for name in ("1", "2", "4", "killed")]
    found = [read_results(folder) for folder in folders]
    assert (
        len({(results["weights_sha256"], results["optimizer_sha256"], results["test_loss"]) for results in found}) == 1
    )
    assert len({tuple(step_losses(folder)) for folder in folders}) == 1
