"""Samples and labels that look usable: they are refused, and never answered or trained on by chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.data.labels import as_raw_labels
from paceline.data.sample_arrays import as_samples
from paceline.errors import EXIT_USER, PacelineError, UserError
from paceline.library.data_objects import read_objects
from paceline.library.functions import write_down

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(80, 4)).astype("float32"), DRAW.integers(0, 2, 80)
QUICK: dict[str, Any] = {"epochs": 1, "global_batch_size": 16, "processes": 1, "track": (), "quiet": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> paceline.Run:
    folder, net = tmp_path_factory.mktemp("linear") / "run", nn.Linear(4, 2)
    net.weight.data.fill_(10.0)
    return paceline.train(model=net, data=(X, Y), augment="none", output_dir=folder, **QUICK)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_a_sample_that_is_not_finite_has_no_class(run: paceline.Run, value: float) -> None:
    samples = X[:3].astype("float64")
    samples[1, 2] = value
    for options in ({}, {"logits": True}, {"transform": lambda sample: sample}):
        with pytest.raises(UserError) as refused:
            run.predict(samples, **options)
        assert "sample 1" in str(refused.value.where)


def test_outputs_that_are_not_finite_have_no_class(run: paceline.Run) -> None:
    samples = X[:3].copy()
    samples[2] = 3e38
    assert not run.predict(samples, logits=True)[2].isfinite().all()
    with pytest.raises(UserError) as refused:
        run.predict(samples)
    assert refused.value.where == "sample 2"
    assert len(run.predict(samples[:2])) == 2


@pytest.mark.parametrize("samples", [torch.from_numpy(X).to_sparse()])
def test_sparse_tensors_are_refused(samples: torch.Tensor) -> None:
    with pytest.raises(UserError) as refused:
        as_samples(samples)
    assert refused.value.hint == "x.to_dense()"


def test_sparse_matrices_are_refused() -> None:
    class Matrix:  # as those of scipy, which have no length
        def toarray(self) -> Any:
            return X

        def __len__(self) -> int:
            raise TypeError("sparse array length is ambiguous")

    with pytest.raises(UserError) as refused:
        as_samples(Matrix())
    assert refused.value.hint == "x.toarray()"


@pytest.mark.parametrize(
    "labels",
    [
        ["a", float("nan"), "b"],
        ["a", None, "b"],
        ["a", 1, "b"],
        ("a", 2.5, "b"),
        np.array(["a", np.nan, "b"], dtype=object),
        np.array([0.0, np.nan, 1.0]),
    ],
)
def test_a_missing_label_is_no_class(labels: Any) -> None:
    with pytest.raises(UserError) as refused:
        as_raw_labels(labels)
    assert refused.value.hint == "leave out the samples without a label"


@pytest.mark.parametrize("part", ["validation", "test"])
def test_a_text_that_only_another_part_has_must_be_stated_as_a_class(part: str) -> None:
    """A mistyped label would become a class of the model."""
    rows: dict[str, Any] = {part: (X[:3], ["cat", "dgo", "cow"])}
    train = X[:30], ["cat", "dog", "cow"] * 10
    with pytest.raises(UserError) as refused:
        read_objects(train, **rows)
    assert (f"{part} part" in refused.value.what, refused.value.got) == (True, "'dgo'")
    names = ("cat", "cow", "dgo", "dog")
    assert read_objects(train, **rows, classes=names).data.info.classes == names


@pytest.mark.parametrize("labels", [["a", "b"], ("a", np.str_("b")), np.array(["a", "b"], dtype=object)])
def test_texts_are_classes(labels: Any) -> None:
    assert as_raw_labels(labels).tolist() == ["a", "b"]


def test_a_run_folder_below_a_file_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PacelineError) as refused:
        paceline.train(model="mlp", data=(X, Y), output_dir=tmp_path / "file" / "run", **QUICK)
    assert (refused.value.exit_code, refused.value.where) == (EXIT_USER, str(tmp_path / "file" / "run"))
    assert (tmp_path / "file").read_text() == "mine"


LAYERS = {"relu": nn.ReLU, "tanh": nn.Tanh}


def test_a_dict_of_layers_reaches_the_ranks_as_source() -> None:
    def build(num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, num_classes), LAYERS["tanh"]())

    names: dict[str, Any] = {}
    exec(write_down([build]), names)
    assert names["LAYERS"] == LAYERS
    assert isinstance(names["build"](2)[1], nn.Tanh)
