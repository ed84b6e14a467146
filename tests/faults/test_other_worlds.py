"""Faults 15 and 16: a run resumes with another world size and uses the same samples. Another run is refused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from faults.damage import forge, newer_schema
from faults.finished_run import FLAGS, NEWEST
from harness.cli import paceline
from harness.ranks import make_world, run_ranks
from harness.runs import quick_config, step_losses, train_in
from paceline.checkpoints.format import NewerSchema, step_folders
from paceline.checkpoints.identity import refuse_early
from paceline.data.loader import Batch, Loader
from paceline.errors import EXIT_CHECKPOINT, CheckpointError
from paceline.metrics.recorder import read_rows
from paceline.runtime.detect import World
from paceline.settings.schema import flatten

MOST_REFUSAL_S = 2.0


# --- Fault 15: other world sizes, other strategies --------------------------------------------------------------------


def train_noting_samples(world: World, folder: str, flags: tuple[str, ...], resume: bool = False) -> list[list[int]]:
    """Train, and return the sample numbers of every batch of this rank."""
    train_epoch, noted = Loader.train_epoch, []

    def noting(self: Loader, **named: Any) -> Iterator[Batch]:
        for batch in train_epoch(self, **named):
            noted.append(batch.ids.tolist())
            yield batch

    Loader.train_epoch = noting  # type: ignore[method-assign]
    train_in(world, folder, flags, resume)
    return noted


def train_in_worlds(folder: Path, legs: list[tuple[int, str, int]]) -> list[list[int]]:
    """One run in several parts (ranks, strategy, last step). Returns the samples of every global batch in order."""
    batches = []
    for number, (ranks, strategy, last_step) in enumerate(legs):
        flags = ("--strategy", strategy, "--max-steps", str(last_step))
        parts = run_ranks(ranks, train_noting_samples, str(folder), flags, number > 0)
        batches += [[sample for share in shares for sample in share] for shares in zip(*parts, strict=True)]
    return batches


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], list[float]]:
    """Samples and losses of the run in one part."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return train_in_worlds(folder, [(1, "single", 18)]), step_losses(folder)


@pytest.mark.faults
@pytest.mark.parametrize(
    "legs",
    [
        [(2, "ddp", 4), (1, "single", 8), (4, "ddp", 18)],
        [(2, "ddp", 5), (2, "fsdp", 9), (1, "single", 11), (4, "fsdp", 15), (2, "ddp", 18)],
    ],
    ids=["2 to 1 to 4", "ddp to fsdp and back"],
)
def test_another_world_size_and_strategy_resumes_with_the_same_samples_and_losses(
    tmp_path: Path, straight: tuple[list[list[int]], list[float]], legs: list[tuple[int, str, int]]
) -> None:
    batches, losses = straight
    assert len(batches) == 18
    assert (
        train_in_worlds(tmp_path, legs) == batches
    )  # every sample is at its place, so each epoch has the same samples
    assert step_losses(tmp_path) == pytest.approx(losses, abs=1e-5)  # sums in another order
    steps = [row["step"] for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "step"]
    assert steps == list(range(1, 19))


def test_a_world_size_that_does_not_divide_the_batch_is_refused_with_the_nearest(run: Path) -> None:
    before = sorted(path.name for path in run.rglob("*"))
    answer = paceline("train", str(run / "config.yaml"), "--resume=auto", "--processes=3", cwd=run.parent)
    assert answer.code == 2
    for part in ("64 is not divisible by 3", "63 or 66", "--processes 2 or 4"):
        assert part in answer.err
    assert sorted(path.name for path in run.rglob("*")) == before


# --- Fault 16: another run --------------------------------------------------------------------------------------------


def refusal(run: Path, *flags: str) -> CheckpointError:
    """The error of a resume with these flags. The finished run stays unchanged."""
    started = time.process_time()
    with pytest.raises(CheckpointError) as refused:
        train_in(make_world(0, 1), str(run), (*FLAGS, "--epochs=3", *flags), resume=True)
    assert time.process_time() - started < MOST_REFUSAL_S
    assert refused.value.exit_code == EXIT_CHECKPOINT
    assert (run / "checkpoints" / NEWEST).is_dir()
    assert step_folders(run / "checkpoints")[0].name == NEWEST
    return refused.value


OTHER_RUNS = {
    "width": (["--hidden-size=99"], ["hidden_size: saved 256, now 99"]),
    "model": (["--model-name=mlp"], ["model_name: saved 'cnn', now 'mlp'"]),
    "data set": (
        ["--dataset=synthetic", "--input-size=3x32x32"],
        ["dataset: saved 'shapes', now 'synthetic'", "input_size: saved '784', now '3x32x32'"],
    ),
    "classes": (
        ["--dataset=synthetic", "--input-size=3x32x32", "--num-classes=7"],
        ["dataset: saved 'shapes', now 'synthetic'", "num_classes: saved 10, now 7"],
    ),
    "order of samples": (["--seed=7"], ["seed: saved 42, now 7"]),
}


@pytest.mark.parametrize("case", OTHER_RUNS)
def test_another_run_is_refused_with_the_differences(case: str, run: Path) -> None:
    flags, lines = OTHER_RUNS[case]
    error = refusal(run, *flags)
    assert len(str(error.got).splitlines()) <= 3
    for line in lines:
        assert line in str(error.got).splitlines()
    assert "--init-from" in error.screen()


def test_of_many_differences_three_are_named(run: Path) -> None:
    flags = ["--seed=7", "--hidden-size=99", "--optimizer=adamw", "--model-name=mlp", "--train-split=0.8"]
    assert len(str(refusal(run, *flags).got).splitlines()) == 3


@pytest.mark.parametrize("case", OTHER_RUNS)
def test_another_run_is_refused_before_torch_is_imported(case: str, run: Path) -> None:
    flags, lines = OTHER_RUNS[case]
    for source in (run, run / "checkpoints" / "latest", run / "checkpoints"):
        started = time.process_time()
        with pytest.raises(CheckpointError) as refused:
            refuse_early(source, flatten(quick_config(*FLAGS, *flags)))
        assert time.process_time() - started < MOST_REFUSAL_S
        assert lines[0] in str(refused.value.got)


def test_the_check_before_torch_accepts_good_damaged_and_missing_checkpoints(run: Path, tmp_path: Path) -> None:
    config = flatten(quick_config(*FLAGS))
    refuse_early(run, config)
    refuse_early(run, config, prefer_best=True)
    refuse_early(tmp_path / "nowhere", config)
    (run / "checkpoints" / NEWEST / "state.json").unlink()
    refuse_early(run, flatten(quick_config(*FLAGS, "--seed=7")))


def without_a_tensor(tensors: dict[str, Any]) -> None:
    del tensors[sorted(tensors)[0]]


def with_another_tensor(tensors: dict[str, Any]) -> None:
    tensors["extra.weight"] = tensors[sorted(tensors)[0]].clone()


def with_a_narrower_tensor(tensors: dict[str, Any]) -> None:
    name = max(tensors, key=lambda name: tensors[name].dim())
    tensors[name] = tensors[name][:-1].clone()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (without_a_tensor, "missing ['"),
        (with_another_tensor, "extra.weight"),
        (with_a_narrower_tensor, "the model has"),
    ],
)
def test_other_tensors_are_refused_by_name(change: Callable[[dict[str, Any]], None], part: str, run: Path) -> None:
    # The config is the same: for example, the user's model file was changed. The manifest is sealed again.
    newest = run / "checkpoints" / NEWEST
    tensors = load_file(newest / "model.safetensors")
    change(tensors)
    save_file(tensors, newest / "model.safetensors")
    forge(newest)
    error = refusal(run)
    assert error.what == "the checkpoint holds another model"
    assert part in str(error.got)
    assert "--init-from" in error.screen()


def test_a_newer_schema_is_refused_and_not_set_aside(run: Path) -> None:
    newer_schema(run / "checkpoints" / NEWEST)
    error = refusal(run)
    assert isinstance(error.__cause__, NewerSchema)
    assert (error.got, error.allowed) == ("schema 2", "schema 1")


def test_a_change_that_keeps_the_result_is_allowed_and_logged(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    shutil.rmtree(run / "logs")
    train_in(make_world(0, 1), str(run), (*FLAGS, "--log-frequency=5"), resume=True)
    assert "note: log_frequency was 1 when the checkpoint was saved, is 5 now" in caplog.messages
    assert json.loads((run / "results.json").read_text())["steps"] == 18
