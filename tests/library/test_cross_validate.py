"""Cross-validation: the split into folds, its flags, and `paceline.cross_validate`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoints.identity import require_same_run
from paceline.checkpoints.store import open_checkpoint
from paceline.data.dataset import DatasetInfo
from paceline.data.order import split_folds
from paceline.errors import CheckpointError, UserError
from paceline.launch.request import read_request
from paceline.settings.schema import flatten
from paceline.training.plan import split_samples

SMALL: dict[str, Any] = {
    "recipe": "synthetic-mlp",
    "num_samples": 300,
    "global_batch_size": 64,
    "epochs": 2,
    "processes": 1,
    "track": (),
    "quiet": True,
}


@pytest.mark.parametrize(("num_samples", "folds"), [(10, 2), (101, 5), (7, 7), (1000, 3)])
def test_validation_parts_are_disjoint_and_cover_the_training_set(num_samples: int, folds: int) -> None:
    parts = [split_folds(num_samples, folds, fold, seed=3) for fold in range(1, folds + 1)]
    everything = torch.arange(num_samples)
    assert torch.equal(torch.cat([validation for _, validation in parts]).sort().values, everything)
    for train, validation in parts:
        assert torch.equal(torch.cat([train, validation]).sort().values, everything)
        assert abs(len(validation) - num_samples / folds) < 1
        assert torch.equal(train, train.sort().values)


def test_the_split_depends_only_on_seed_and_fold() -> None:
    first = split_folds(100, 5, 2, seed=1)
    again = split_folds(100, 5, 2, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], split_folds(100, 5, 2, seed=2)[1])
    assert not torch.equal(first[1], split_folds(100, 5, 3, seed=1)[1])


def test_the_split_of_a_run_without_folds_equals_that_of_earlier_versions() -> None:
    info = DatasetInfo(
        name="own",
        num_train=20,
        num_test=4,
        classes=("a", "b"),
        sample_shape=(3, 8, 8),
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
    )
    config = read_request("shapes-cnn", ["--seed=7"]).config
    train, validation = split_samples(info, config)
    assert (len(train), validation.tolist()) == (18, split_samples(info, read_request("shapes-cnn").config)[1].tolist())
    with pytest.raises(UserError) as caught:
        split_samples(info, read_request("shapes-cnn", ["--folds=21", "--fold=1"]).config)
    assert caught.value.allowed == "up to 20"


@pytest.mark.parametrize(
    "flags",
    [
        ["--folds=1", "--fold=1"],
        ["--folds=5"],
        ["--fold=2"],
        ["--folds=5", "--fold=6"],
        ["--folds=-1"],
        ["--folds=5", "--fold=1", "--train-split=0.8"],
        ["--folds=many"],
    ],
)
def test_wrong_folds_are_refused(flags: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read_request("shapes-cnn", flags)
    assert caught.value.where is not None


def test_data_with_its_own_validation_set_has_no_folds(tmp_path: Path) -> None:
    for part in ("train", "val", "test"):
        for name in ("a", "b"):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            (folder / "1.png").write_bytes(b"")
    with pytest.raises(UserError, match="--folds"):
        read_request("shapes-cnn", ["--dataset=folder", f"--data-dir={tmp_path}", "--folds=2", "--fold=1"])


@pytest.mark.parametrize("wrong", [{"folds": 1}, {"folds": "5"}, {"folds": True}, {"fold": 2}, {"train_split": 0.5}])
def test_wrong_arguments_are_refused_before_the_start(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        paceline.cross_validate(**{**SMALL, **wrong})
    assert next(iter(wrong)) in str(caught.value.where)
    with pytest.raises(UserError, match="fold"):
        paceline.train(**SMALL, folds=5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_run_per_fold_with_mean_and_deviation(tmp_path: Path) -> None:
    found = paceline.cross_validate(**SMALL, folds=2, output_dir=tmp_path / "cv")
    assert [run.path.name for run in found.runs] == ["fold-1", "fold-2"]
    assert [run.config.data.fold for run in found.runs] == [1, 2]
    best = [next(row for row in run.metrics("val") if row["epoch"] == run.results["best_epoch"]) for run in found.runs]
    assert found.mean["val_loss"] == statistics.fmean(row["loss"] for row in best)
    assert found.deviation["val_accuracy"] == statistics.stdev(row["accuracy"] for row in best)
    assert found.mean["test_loss"] == statistics.fmean(run.results["test_loss"] for run in found.runs)
    assert found.table.column("fold") == [1, 2, "mean", "deviation"]
    assert str(found) == str(found.table)
    assert found._repr_html_().count("<tr>") == 5
    # The fold is part of the identity of a run, and the same call continues.
    checkpoint = open_checkpoint(found.runs[0].path / "checkpoints" / "latest")
    now = flatten(found.runs[0].config)
    require_same_run(checkpoint, now)
    with pytest.raises(CheckpointError) as refused:
        require_same_run(checkpoint, {**now, "fold": 2})
    assert "fold" in str(refused.value.got)
    again = paceline.cross_validate(**SMALL, folds=2, output_dir=tmp_path / "cv", resume="auto")
    assert again.mean == found.mean


def test_a_regression_has_no_accuracy_in_its_epochs_and_scores(tmp_path: Path) -> None:
    seen: list[paceline.Epoch] = []
    data = {"dataset": "harness.task_data:numbers", "task": "regression", "on_epoch": seen.append}
    small = {**SMALL, **data, "epochs": 1, "global_batch_size": 16, "folds": 2}
    scores = paceline.cross_validate(**small, output_dir=tmp_path / "cv")
    assert [(epoch.train_accuracy, epoch.val_accuracy) for epoch in seen] == [(None, None)] * 2
    names = ["val_loss", "val_mae", "val_rmse", "test_loss", "test_mae", "test_rmse"]
    assert list(scores.mean) == list(scores.deviation) == names


def test_a_checkpoint_of_an_earlier_version_has_no_folds() -> None:
    """Its config does not have the settings."""

    class Old:
        path = Path("old")
        now = flatten(read_request("shapes-cnn").config)
        state: dict[str, Any] = {  # noqa: RUF012
            "config": {name: value for name, value in now.items() if name not in ("folds", "fold")}
        }

    require_same_run(Old, Old.now)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        require_same_run(Old, {**Old.now, "folds": 5, "fold": 1})  # type: ignore[arg-type]
