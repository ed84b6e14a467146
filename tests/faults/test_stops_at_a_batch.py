"""A stop request in any phase ends a run within one batch. The resumed run equals an undisturbed one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.ranks import run_ranks
from harness.runs import quick_config, read_results, train_in
from paceline.checkpoints.format import step_folders, step_of
from paceline.errors import Preempted
from paceline.metrics.recorder import read_rows
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.runtime.detect import World
from paceline.training.guards import Guards
from paceline.training.loop import train

STEPS_PER_EPOCH = 9
FLAGS = ("--test-batch-size", "8", "--ema-decay", "0.9", "--keep-last", "9")  # four batches of validation on two ranks
BATCHNORM = (*FLAGS, "--model-name", "harness.batchnorm_model:build", "--global-batch-size", "63")


def train_until_asked(
    world: World, folder: str, flags: tuple[str, ...], phase: str, step: int, nth: int, resume: bool = False
) -> dict[str, Any]:
    """Train. The last rank gets a stop request when it enters a phase of a step for the n-th time."""
    path = Path(folder)
    RunFolder(path).create()
    guards = Guards()
    seen: Counter[tuple[str, int]] = Counter()
    after: list[str] = []  # phases of this rank after the stop request

    def on_phase(now: str, at: int) -> None:
        seen[now, at] += 1
        if (now, at) == (phase, step) and seen[now, at] >= nth:
            after.append(now)
            if world.rank == world.world_size - 1:
                guards.stop.ask("SIGTERM")
        elif after:
            after.append(now)

    guards.observers.append(on_phase)
    try:
        train(quick_config(*flags), world, RunPlace(path, path if resume else None), guards)
    except Preempted as stopped:
        return {"what": stopped.what, "after": after}
    return {"what": "", "after": after}


def outcome(folder: Path) -> dict[str, object]:
    results = read_results(folder)
    names = ("weights_sha256", "test_loss", "test_accuracy", "best_epoch", "best_validation_accuracy", "steps")
    rows = read_rows(folder / "metrics.jsonl")
    unmeasured = ("time", "throughput", "seconds", "memory_mb", "memory_peak_mb", "data_wait")
    return {
        **{name: results[name] for name in names},
        "rows": [{name: value for name, value in row.items() if name not in unmeasured} for row in rows],
        "best": (folder / "checkpoints" / "best").resolve().name,
        "saved": [step_of(path) for path in step_folders(folder / "checkpoints")],
        "final_loss": results["performance"]["avg_final_loss"],
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run_ranks(2, train_in, str(folder), FLAGS)
    return outcome(folder)


@pytest.mark.parametrize(
    ("phase", "step", "nth"),
    [
        ("evaluate", STEPS_PER_EPOCH, 2),  # the first validation
        pytest.param("evaluate", 2 * STEPS_PER_EPOCH, 2, marks=pytest.mark.faults),  # the last one
        pytest.param("update", STEPS_PER_EPOCH - 1, 1, marks=pytest.mark.faults),  # at an epoch's last step
        ("evaluate", 2 * STEPS_PER_EPOCH, 5),  # the test
    ],
    ids=["first-validation", "last-validation", "last-step", "test"],
)
def test_a_stop_ends_an_evaluation_at_the_next_batch(
    phase: str, step: int, nth: int, tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    """One rank gets the request: all ranks stop at the same next batch and save. The resumed run is bit-equal."""
    folder = tmp_path / "run"
    answers = run_ranks(2, train_until_asked, str(folder), FLAGS, phase, step, nth)
    at = step if phase == "evaluate" else step + 1
    for answer in answers:
        assert answer["what"] == f"stopped at step {at} and saved (SIGTERM)", answers
        # The batch of the request, at most one more, and the save.
        assert answer["after"].count("evaluate") <= (2 if phase == "evaluate" else 0), answers
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["step"]) == ("preempted", at)
    assert not (folder / "results.json").exists()
    run_ranks(2, train_in, str(folder), FLAGS, True)
    assert outcome(folder) == undisturbed


@pytest.mark.faults
def test_a_stop_in_validation_keeps_each_ranks_statistics(tmp_path: Path) -> None:
    """Three ranks with BatchNorm, stopped twice in one validation. It is repeated from the same statistics."""
    run_ranks(3, train_in, str(tmp_path / "whole"), BATCHNORM)
    cut = str(tmp_path / "cut")
    step = json.loads((tmp_path / "whole" / "checkpoints" / "latest" / "state.json").read_text())["steps_per_epoch"]
    for number, resume in enumerate((False, True), start=1):
        answers = run_ranks(3, train_until_asked, cut, BATCHNORM, "evaluate", step, number, resume)
        assert {answer["what"] for answer in answers} == {f"stopped at step {step} and saved (SIGTERM)"}
        buffers = load_file(tmp_path / "cut" / "checkpoints" / "latest" / "statistics.safetensors")
        means = [rows for name, rows in buffers.items() if name.endswith("running_mean")]
        assert means
        # The statistics from before the validation, which differ between ranks.
        assert not any(torch.equal(rows[0], rows[1]) for rows in means)
    run_ranks(3, train_in, cut, BATCHNORM, True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


@pytest.mark.faults
def test_a_stop_under_fsdp(tmp_path: Path, undisturbed: dict[str, object]) -> None:
    """Sharded models exchange weights in each batch of an evaluation, so all ranks must stop at the same batch."""
    flags = (*FLAGS, "--strategy", "fsdp")
    run_ranks(2, train_in, str(tmp_path / "whole"), flags)
    cut = str(tmp_path / "cut")
    run_ranks(2, train_until_asked, cut, flags, "evaluate", STEPS_PER_EPOCH, 2)
    run_ranks(2, train_in, cut, flags, True)
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_stop_during_a_save_finishes_it_and_does_not_save_again(tmp_path: Path) -> None:
    """The run stops at the step of this save. The next batch is discarded."""
    flags = (*FLAGS, "--save-steps", "4")
    run_ranks(2, train_in, str(tmp_path / "whole"), flags)
    cut = tmp_path / "cut"
    answers = run_ranks(2, train_until_asked, str(cut), flags, "save", 4, 1)
    assert {answer["what"] for answer in answers} == {"stopped at step 4 and saved (SIGTERM)"}
    assert [step_of(path) for path in step_folders(cut / "checkpoints")] == [4]
    run_ranks(2, train_in, str(cut), flags, True)
    assert outcome(cut) == outcome(tmp_path / "whole")


def test_a_stop_before_the_first_step_reports_no_checkpoint(tmp_path: Path) -> None:
    """A stop request while the run is set up: no training, no save, and the status says so."""
    answers = run_ranks(2, train_until_asked, str(tmp_path / "run"), FLAGS, "start", 0, 1)
    assert {answer["what"] for answer in answers} == {"stopped at step 0 without a checkpoint of it (SIGTERM)"}
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"
    assert step_folders(tmp_path / "run" / "checkpoints") == []
