"""Fault 11: losses and gradients that are NaN or infinite, and losses that jump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness import batchnorm_model
from harness.ranks import run_ranks
from harness.runs import quick_config, step_losses
from harness.short_run import injected_faults
from paceline.checkpoints.format import step_folders, step_of, verify
from paceline.errors import NonFiniteError
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.runtime.detect import World
from paceline.training.guards import Guards
from paceline.training.loop import train

NORMALISED = f"--model-name={batchnorm_model.__file__}:build"
SLOWER = pytest.mark.faults
STRATEGIES = {
    "ddp": (2, ("--strategy=ddp",)),
    "exact": (2, ("--exact", "--lanes=4")),
    "fsdp": (2, ("--strategy=fsdp",)),
    "single": (1, ()),
}


def train_rank(world: World, path: str, flags: tuple[str, ...], inject: str) -> dict[str, Any]:
    """Train 18 steps with a fault. Returns the result on this rank."""
    folder = RunFolder(Path(path))
    folder.create()
    config = quick_config("--save-steps=3", *flags, f"--inject={inject}")
    guards = Guards().for_run(config, world, folder, attempt=1)
    try:
        results = train(config, world, RunPlace(folder.path, None), guards)
    except NonFiniteError as error:
        return {"error": error.what, "got": error.got, "hint": error.hint, "step": guards.watchdog.pulse.step}
    return results.to_json()


def weights_in(folder: Path) -> torch.Tensor:
    newest = step_folders(folder / "checkpoints")[0]
    verify(newest)
    return torch.cat([tensor.flatten().float() for tensor in load_file(newest / "model.safetensors").values()])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *(pytest.param(s, marks=SLOWER) for s in ("exact", "single"))])
def test_every_rank_stops_in_the_same_step_before_the_update(strategy: str, tmp_path: Path) -> None:
    ranks, flags = STRATEGIES[strategy]
    bad_rank = ranks - 1
    answers = run_ranks(ranks, train_rank, str(tmp_path), flags, f"nan rank={bad_rank} step=8")
    assert injected_faults(tmp_path) == [f"nan (rank {bad_rank}, step 8)"]
    assert [answer["step"] for answer in answers] == [8] * ranks
    words = answers[0]["error"]
    assert all(answer["error"] == words for answer in answers)
    assert words.startswith(
        f"the loss is nan at step 8; rank {bad_rank}: first bad tensor the batch's inputs, samples "
    )
    # The copy of the batch contains the bad sample that the message names.
    kept = load_file(tmp_path / "bad-batches" / f"step-00000008-rank-{bad_rank}.safetensors")
    bad = ~torch.isfinite(kept["inputs"].flatten(1)).all(1)
    assert kept["ids"][bad].tolist() == [int(words.rpartition("samples ")[2])]
    assert step_of(step_folders(tmp_path / "checkpoints")[0]) == 6
    if strategy != "fsdp":  # this batch is in two files
        assert torch.isfinite(weights_in(tmp_path)).all()


@pytest.mark.parametrize("strategy", ["ddp", *(pytest.param(s, marks=SLOWER) for s in ("exact", "fsdp"))])
def test_an_infinite_gradient_is_named(strategy: str, tmp_path: Path) -> None:
    ranks, flags = STRATEGIES[strategy]
    answers = run_ranks(ranks, train_rank, str(tmp_path), flags, "inf-gradient rank=1 step=8")
    assert injected_faults(tmp_path) == ["inf-gradient (rank 1, step 8)"]
    assert [answer["step"] for answer in answers] == [8] * ranks
    words = answers[0]["error"]
    assert "but a gradient is" in words
    if strategy == "fsdp":
        assert "on all ranks together" in words
    else:
        assert "rank 1: first bad tensor the gradient of features.0.weight, samples " in words


@pytest.mark.parametrize("strategy", ["ddp", *(pytest.param(s, marks=SLOWER) for s in ("exact", "single"))])
def test_a_skipped_step_does_not_change_the_weights_or_statistics(strategy: str, tmp_path: Path) -> None:
    # Otherwise BatchNorm's running statistics would keep a NaN.
    ranks, flags = STRATEGIES[strategy]
    flags = (*flags, NORMALISED, "--skip-nonfinite=2")
    (results, *_) = run_ranks(ranks, train_rank, str(tmp_path), flags, "nan rank=0 step=8")
    assert injected_faults(tmp_path) == ["nan (rank 0, step 8)"]
    assert results["steps"] == 18
    assert torch.isfinite(weights_in(tmp_path)).all()
    assert all(loss == loss for loss in step_losses(tmp_path))


@SLOWER
def test_too_many_skipped_steps_end_the_run(tmp_path: Path) -> None:
    inject = "; ".join(f"nan rank=1 step={step}" for step in (4, 5, 6))
    answers = run_ranks(2, train_rank, str(tmp_path), ("--skip-nonfinite=2",), inject)
    assert len(injected_faults(tmp_path)) == 3
    assert [answer["step"] for answer in answers] == [6, 6]
    assert torch.isfinite(weights_in(tmp_path)).all()


def test_rollback_skips_the_bad_batch(tmp_path: Path) -> None:
    inject = "nan rank=1 step=8; nan rank=0 step=11"
    answers = run_ranks(2, train_rank, str(tmp_path), ("--on-nonfinite=rollback", NORMALISED), inject)
    assert len(injected_faults(tmp_path)) == 2
    assert [answer["steps"] for answer in answers] == [18, 18]
    newest = step_folders(tmp_path / "checkpoints")[0]
    assert '"jumped": [\n  7,\n  10\n ]' in (newest / "state.json").read_text()
    assert answers[0]["weights_sha256"] == answers[1]["weights_sha256"]
    assert len(step_losses(tmp_path)) == 16  # no step twice, and no rows for the skipped steps


@SLOWER
def test_rollback_ends_the_run_if_the_batch_is_not_the_cause(tmp_path: Path) -> None:
    inject = "; ".join(f"nan rank=1 step={step}" for step in (5, 6, 7, 8))
    flags = ("--on-nonfinite=rollback", "--save-steps=4", "--num-samples=1280")
    (answer, _) = run_ranks(2, train_rank, str(tmp_path), flags, inject)
    assert len(injected_faults(tmp_path)) == 4
    assert "3 times already" in answer["got"]


def test_a_jump_of_the_loss_can_roll_back(tmp_path: Path) -> None:
    flags = ("--on-nonfinite=rollback", "--spike-factor=3")
    answers = run_ranks(2, train_rank, str(tmp_path), flags, "spike rank=1 step=14")
    assert injected_faults(tmp_path) == ["spike (rank 1, step 14)"]
    assert [answer["steps"] for answer in answers] == [18, 18]
    newest = step_folders(tmp_path / "checkpoints")[0]
    assert '"jumped": [\n  13\n ]' in (newest / "state.json").read_text()


@SLOWER
def test_a_jump_of_the_loss_is_no_error_by_default(tmp_path: Path) -> None:
    (results, _) = run_ranks(2, train_rank, str(tmp_path), (), "spike rank=1 step=14")
    assert injected_faults(tmp_path) == ["spike (rank 1, step 14)"]
    assert results["steps"] == 18
