"""Arrays with numbers (regression) and with several labels per sample as data of `paceline.train`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from harness.cli import command
from paceline.errors import UserError
from paceline.library.data_objects import read_objects

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "library.md"
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(160, 6)).astype("float32")
NUMBERS: NDArray[Any] = X[:, :2].astype("float64")
FLAGS = (X[:, :3] > 0).astype(int)
QUICK: dict[str, Any] = {"global_batch_size": 32, "epochs": 2, "track": (), "quiet": True, "omp_num_threads": 1}
QUICK |= {"augment": "none", "optimizer": "adamw", "base_lr": 0.05}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_regression_on_arrays_is_trained_evaluated_predicted_and_resumed(tmp_path: Path) -> None:
    run = paceline.train(
        model=nn.Linear(6, 2),
        data=(X[:96], NUMBERS[:96]),
        validation=TensorDataset(torch.from_numpy(X[96:128]), torch.from_numpy(NUMBERS[96:128])),
        test=(torch.from_numpy(X[128:]), NUMBERS[128:].tolist()),
        task="regression",
        classes=["width", "height"],
        output_dir=tmp_path / "run",
        **QUICK,
    )
    assert run.results["test_accuracy"] is None
    test = run.evaluate()
    assert run.results["test_metrics"]["mae"] == test.metrics["mae"]
    assert run.evaluate((X[128:], NUMBERS[128:])).metrics == test.metrics
    outputs = run.predict(X[128:], logits=True).double().numpy()
    assert np.abs(outputs - NUMBERS[128:]).mean() == pytest.approx(test.metrics["mae"], rel=1e-5)  # sums of float32
    assert list(run.predict(X[0])[0].values) == ["width", "height"]
    assert run.export("torchscript").is_dir()
    with pytest.raises(UserError):
        run.evaluate((X, NUMBERS[:, 0]))
    assert run.resume(epochs=3, quiet=True).results["steps"] == 9


def test_several_labels_per_sample_are_a_matrix() -> None:
    run = paceline.train(model=nn.Linear(6, 3), data=(X, FLAGS), task="multi-label", classes=["a", "b", "c"], **QUICK)
    assert run.results["task"] == "multi-label"
    assert set(run.predict(X[0])[0].probabilities) == {"a", "b", "c"}


def test_a_cross_validation_of_a_regression() -> None:
    found = paceline.cross_validate(folds=2, model=nn.Linear(6, 1), data=(X, NUMBERS[:, 0]), task="regression", **QUICK)
    assert found.mean["val_mae"] > 0


@pytest.mark.parametrize("numbers", [NUMBERS[:, 0], NUMBERS[:, :1], NUMBERS[:, 0].tolist()])
def test_a_column_of_numbers_is_one_number_per_sample(numbers: Any) -> None:
    data = read_objects((X, numbers), task="regression").data
    assert data.info.num_classes == 1
    assert len(data.train) + len(data.test) == len(X)


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        (np.where(np.arange(160) == 3, np.nan, NUMBERS[:, 0]), "regression"),
        (np.where(np.arange(160) == 3, np.inf, NUMBERS[:, 0]), "regression"),
        (NUMBERS * 1e300, "regression"),
        ([10**400] * 160, "regression"),
        (NUMBERS[:, :, None], "regression"),
        (NUMBERS[:100], "regression"),
        (np.ma.masked_less(NUMBERS, 0), "regression"),
        (np.array(["a"] * 160), "regression"),
        (FLAGS[:, 0], "multi-label"),
        (FLAGS + 1, "multi-label"),
        (NUMBERS[:, 0], "single-label"),
    ],
)
def test_wrong_targets_are_refused(labels: Any, task: str, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        paceline.train(model="mlp", data=(X, labels), task=task, **QUICK)
    assert not list(tmp_path.iterdir())


def test_mixup_and_a_wrong_task_are_refused(tmp_path: Path) -> None:
    for flags in ({"task": "regression", "mixup_alpha": 0.2}, {"task": "regresion"}):
        with pytest.raises(UserError):
            paceline.train(model=nn.Linear(6, 1), data=(X, NUMBERS[:, 0]), **QUICK, **flags)
    assert not list(tmp_path.iterdir())


def test_the_example_of_the_guide(tmp_path: Path) -> None:
    section = GUIDE.read_text().partition("### Numbers and several labels")[2]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    (tmp_path / "example.py").write_text(code)
    answer = command(sys.executable, "example.py", cwd=tmp_path)
    assert answer.code == 0, answer
    assert "width" in answer.out
