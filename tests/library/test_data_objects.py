"""Arrays and data sets as objects for `paceline.train`: the weights of a function, and one screen for bad input."""

from __future__ import annotations

import functools
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from harness.cli import command
from paceline.data.array_folder import labels_file, samples_file
from paceline.data.parts import PARTS, TEST
from paceline.data.sources.arrays import write_arrays
from paceline.errors import CheckpointError, DataError, PacelineError, UserError
from paceline.library import data_objects
from paceline.library.data_objects import read_objects
from paceline.runs.folder import RunFolder
from paceline.settings.schema import Config, flatten
from paceline.tools.doctor.machine import gather_memory

Array = NDArray[Any]
CLASSES = ("ant", "bee", "cat")
QUICK: dict[str, Any] = {"global_batch_size": 32, "epochs": 2, "track": (), "quiet": True, "omp_num_threads": 1}
FUNCTION = """
import numpy as np

def make(data_dir):
    parts = {part: tuple(np.load(f"{data_dir}/{part}-{name}.npy") for name in "xy") for part in %r}
    return {**parts, "classes": ["ant", "bee", "cat"]}
"""


def made(kind: str, count: int, seed: int = 0) -> tuple[Array, Array]:
    """Samples whose mean depends on the class, and texts as labels."""
    rng = np.random.default_rng(seed)
    numbers = np.arange(count) % 3
    if kind == "uint8":
        noise = rng.integers(0, 100, (count, 8, 8, 3))
        return (noise + 60 * numbers[:, None, None, None]).astype(np.uint8), np.array(CLASSES)[numbers]
    noise = rng.normal(size=(count, 5, 8, 8)).astype(np.float32)
    return noise + numbers[:, None, None, None].astype(np.float32), np.array(CLASSES)[numbers]


class Pairs(Dataset[tuple[Any, Any]]):
    def __init__(self, samples: Sequence[Any] | Array, labels: Sequence[Any] | Array) -> None:
        self.samples, self.labels_of = samples, labels

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.samples[index], self.labels_of[index]


class Feature:
    def __init__(self, names: list[str]) -> None:
        self.names = names


class FakeHuggingFace:
    """Has the interface of `datasets.Dataset` that is used here."""

    column_names = ("image", "label")

    def __init__(self, samples: Array, labels: Array) -> None:
        self._columns: dict[str, Any] = {"image": list(samples), "label": labels.tolist()}
        self.features = {"image": None, "label": Feature(list(CLASSES))}
        self.num_items_read = 0

    def __len__(self) -> int:
        return len(self._columns["label"])

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        self.num_items_read += 1
        return {name: column[key] for name, column in self._columns.items()}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> paceline.Run:
    """Float images of five channels, with texts as labels and no test set."""
    folder = tmp_path_factory.mktemp("objects") / "run"
    return paceline.train(model="cnn", data=made("float", 200), processes=1, output_dir=folder, **QUICK)


# --- Exactness


@pytest.mark.long
@pytest.mark.parametrize("kind", ["uint8", "float"])
def test_arrays_give_the_weights_of_a_function_on_one_and_two_ranks(kind: str, tmp_path: Path) -> None:
    parts = {part: made(kind, count, seed) for seed, (part, count) in enumerate(zip(PARTS, (160, 32, 48), strict=True))}
    for part, (samples, labels) in parts.items():
        np.save(tmp_path / f"{part}-x.npy", samples)
        np.save(tmp_path / f"{part}-y.npy", labels)
    (tmp_path / "mine.py").write_text(FUNCTION % (PARTS,))
    flags = {**QUICK, "exact": True, "lanes": 2, "dropout": 0.2}
    objects = {"data": parts["train"], "validation": parts["validation"], "test": parts["test"]}
    named = {"data": "mine.py:make", "data_dir": str(tmp_path)}
    results = [
        paceline.train(model="cnn", processes=processes, **given, **flags).results
        for given in (named, objects)
        for processes in (1, 2)
    ]
    assert len({(result["weights_sha256"], result["test_loss"]) for result in results}) == 1


def test_every_form_of_the_same_data_is_written_as_the_same_arrays(trained: paceline.Run, tmp_path: Path) -> None:
    x, y = made("float", 200)
    numbers = np.searchsorted(CLASSES, y)
    unwritable = x.copy()
    unwritable.flags.writeable = False
    forms: list[dict[str, Any]] = [
        {"data": (x, y)},
        {"data": (torch.from_numpy(x), y.tolist())},
        {"data": [x.astype(np.float64), y.astype(object)]},
        {"data": (list(x), y)},
        {"data": (unwritable, y)},
        {"data": (x[::-1].copy()[::-1], y)},
        {"data": Pairs(x, y)},
        {"data": TensorDataset(torch.from_numpy(x), torch.from_numpy(numbers)), "classes": list(CLASSES)},
        {"data": FakeHuggingFace(x, numbers)},
        {"data": {"train": (x, y)}},
        {"data": (x * 2, y), "transform": lambda sample: sample / 2},
        {"data": Pairs(x * 2, y), "transform": lambda sample: sample / 2},
    ]
    for form in forms:
        objects = read_objects(**form)
        assert write_arrays(objects.data, objects.header, tmp_path).name == Path(trained.config.data.data_dir).name
    assert len(list(tmp_path.iterdir())) == 1  # drafts are removed


def test_labels_of_a_column_are_read_at_once() -> None:
    x, y = made("float", 200)
    numbers = np.searchsorted(CLASSES, y)
    data = FakeHuggingFace(x, numbers)
    read_objects(data, test=Pairs(x, numbers))
    assert data.num_items_read < 20


def test_labels_are_read_once_if_the_test_set_is_held_out() -> None:
    class Counting(Pairs):
        num_items_read = 0

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            self.num_items_read += 1
            return super().__getitem__(index)

    data = Counting(*made("float", 200))
    read_objects(data)
    assert 200 <= data.num_items_read < 220


@pytest.mark.parametrize(("labels", "classes"), [([True, False] * 5, ("False", "True")), ([1, 0] * 5, ("0", "1"))])
def test_bools_and_numbers_are_labels(labels: list[Any], classes: tuple[str, ...]) -> None:
    objects = read_objects((np.zeros((10, 4), np.float32), labels), test=(np.zeros((10, 4), np.float32), labels))
    assert objects.data.info.classes == classes
    assert objects.data.train.labels.tolist() == [int(label) for label in labels]


def test_a_data_function_that_ranks_cannot_import_is_called_here(tmp_path: Path) -> None:
    """A closure over arrays and a functools.partial: their arrays are written."""
    x, y = made("float", 100)

    def make(seed: int, data_dir: str) -> dict[str, Any]:
        assert (seed, data_dir) == (7, "here")
        return {"train": (x, y), "test": (x[:30], y[:30])}

    def make_scaled(scale: float) -> dict[str, Any]:
        return {"train": (x / scale, y), "test": (x[:30] / scale, y[:30])}

    flags = {**QUICK, "processes": 1, "max_steps": 1}
    runs = [
        paceline.train(model="cnn", data=make, seed=7, data_dir="here", output_dir="closure", **flags),
        paceline.train(model="cnn", data=functools.partial(make_scaled, 1.0), seed=7, output_dir="partial", **flags),
    ]
    assert runs[0].results["weights_sha256"] == runs[1].results["weights_sha256"]
    assert runs[0].config.data.dataset == "arrays"
    assert runs[0].evaluate().samples == 30


# --- A run on arrays


def test_settings_that_are_not_given_have_the_defaults_of_the_schema(trained: paceline.Run) -> None:
    given = (*QUICK, "processes", "output_dir", "dataset", "data_dir")
    found, defaults = flatten(trained.config), flatten(Config())
    assert {name for name in found if found[name] != defaults[name]} <= set(given)
    assert trained.config.data.augment == "light"


def test_a_run_is_named_by_name_or_by_its_model(tmp_path: Path) -> None:
    data = made("float", 100)
    for name, expected in (("my-run", "my-run"), (None, "cnn")):
        run = paceline.train(model="cnn", data=data, processes=1, max_steps=1, name=name, **QUICK)
        assert re.fullmatch(rf"{expected}-\d{{8}}-\d{{6}}", run.name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_header_shows_every_choice(capfd: pytest.CaptureFixture[str]) -> None:
    flags = {**QUICK, "quiet": False, "max_steps": 1}
    paceline.train(model="cnn", data=made("float", 100), validation=made("float", 30, 1), processes=1, **flags)
    lines = dict(
        line.split(maxsplit=1) for line in reversed(capfd.readouterr().out.splitlines()) if " " in line.strip()
    )
    assert lines["data"].startswith("arrays: 80 train (data), 30 validation (own set), 20 test (held out of data)")
    assert lines["augment"] == "light, flip, floats are not normalised"
    assert lines["optimizer"] == "sgd, momentum 0.9, weight decay 0.0005, cosine schedule"
    assert lines["paceline"].startswith(f"{paceline.__version__}: cnn on 1 rank")


def test_a_run_without_its_data_and_source_predicts_the_same_bits(trained: paceline.Run, tmp_path: Path) -> None:
    x, _ = made("float", 10, seed=7)
    copy = tmp_path / "elsewhere" / "run"
    shutil.copytree(trained.path, copy, symlinks=True)
    shutil.rmtree(copy / "arrays")
    away = trained.path.with_name("away")
    trained.path.rename(away)
    try:
        moved = paceline.load_run(copy)
        found = moved.predict(x, logits=True)
        with pytest.raises(DataError):
            moved.evaluate()
        with pytest.raises(PacelineError):
            moved.resume(epochs=3, quiet=True)
    finally:
        away.rename(trained.path)
    assert torch.equal(found, trained.predict(x, logits=True))


def test_a_copied_run_with_its_arrays_is_evaluated(trained: paceline.Run, tmp_path: Path) -> None:
    shutil.copytree(trained.path, tmp_path / "run", symlinks=True)
    away = trained.path.with_name("away")
    trained.path.rename(away)
    try:
        found = paceline.load_run(tmp_path / "run").evaluate()
    finally:
        away.rename(trained.path)
    assert found.accuracy == trained.results["test_accuracy"]
    assert found.loss == trained.results["test_loss"]


def test_evaluate_and_predict_take_objects(trained: paceline.Run) -> None:
    stored = Path(trained.config.data.data_dir)
    x, numbers = np.load(stored / samples_file(TEST)), np.load(stored / labels_file(TEST))
    y = np.array(CLASSES)[numbers]
    for data in ((x, y), (x, numbers), (torch.from_numpy(x), y.tolist()), Pairs(x, y), FakeHuggingFace(x, numbers)):
        assert trained.evaluate(data).accuracy == trained.results["test_accuracy"]
    assert trained.evaluate((x * 2, y), transform=lambda sample: sample / 2).loss == trained.results["test_loss"]
    logits = trained.predict(x, logits=True)
    for images in (torch.from_numpy(x), list(x), Pairs(x, y), FakeHuggingFace(x, numbers)):
        assert torch.equal(trained.predict(images, logits=True), logits)
    assert torch.equal(trained.predict(x[0], logits=True), trained.predict(x[:1], logits=True))
    assert [answer.label for answer in trained.predict(x)] == [CLASSES[row] for row in logits.argmax(1).tolist()]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, y: (x[:, :4], y),
        lambda x, y: ((x * 20).clip(0, 255).astype(np.uint8), y),
        lambda x, y: (x, np.where(y == "ant", "dog", y)),
        lambda x, y: (x, np.full(len(y), 3)),
        lambda x, y: (x, np.zeros(len(y))),
        lambda x, y: (np.full_like(x, np.nan), y),
        lambda x, y: (x, y[:-1]),
        lambda x, y: (x[:0], y[:0]),
        lambda x, y: "cifar10",
    ],
)
def test_evaluate_refuses_incompatible_data(trained: paceline.Run, wrong: Callable[[Array, Array], Any]) -> None:
    with pytest.raises(UserError) as caught:
        trained.evaluate(wrong(*made("float", 12)))
    assert "run.evaluate" in str(caught.value.where) or "trained on other samples" in caught.value.what


# --- Resume


@pytest.mark.long
def test_a_resume_with_other_arrays_is_refused_and_writes_nothing(trained: paceline.Run, tmp_path: Path) -> None:
    shutil.copytree(trained.path, tmp_path / "run", symlinks=True)
    run, (x, y) = tmp_path / "run", made("float", 200)
    before = {path: path.read_bytes() for path in (run / "arrays").rglob("*") if path.is_file()}
    again: dict[str, Any] = {**QUICK, "model": "cnn", "processes": 1, "output_dir": run, "resume": "auto", "epochs": 3}
    other = x.copy()
    other[5, 0, 0, 0] += 1
    for changed in ((other, y), (x, np.roll(y, 1))):
        with pytest.raises(CheckpointError):
            paceline.train(data=changed, **again)
        assert {path: path.read_bytes() for path in (run / "arrays").rglob("*") if path.is_file()} == before
    longer = paceline.train(data=(x, y), **again)
    assert longer.results["steps"] > trained.results["steps"]
    assert len(list((run / "arrays").iterdir())) == 1  # the same arrays are not written twice
    accepted = paceline.train(data=(other, y), accept_new_data=True, **{**again, "epochs": 4})
    assert len(list((run / "arrays").iterdir())) == 2
    assert accepted.evaluate().accuracy == accepted.results["test_accuracy"]


# --- Bad input

X, Y = made("float", 40)
NAN = X.copy()
NAN[3, 0, 2, 2] = np.nan


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": (X, Y[:-1])}, "40 samples and 39 labels"),
        ({"data": (NAN, Y)}, "train part, sample 3"),
        ({"data": (X, Y), "test": (np.full_like(X, np.inf), Y)}, "test part, sample 0"),
        ({"data": (X.astype(np.float64) * 1e60, Y)}, "not finite"),
        ({"data": (X, np.arange(40.0) % 3)}, "float64 of shape (40,)"),
        ({"data": (X, [None] * 40)}, "labels of this kind"),
        ({"data": (X, np.arange(40)[:, None])}, "y.ravel()"),
        ({"data": (X, np.eye(4)[np.arange(40) % 4])}, "y.argmax(1)"),
        ({"data": (X, ["ant"] * 40)}, "all labels are the same"),
        ({"data": X}, "data=(x, y)"),
        ({"data": DataLoader(Pairs(X, Y))}, "loader.dataset"),
        ({"data": (X, Y), "classes": ["ant", "bee"]}, "'cat'"),
        ({"data": (X, Y), "classes": 3}, "class names"),
        ({"data": (X, Y), "test": (X, np.arange(40) % 3)}, "several kinds"),
        ({"data": (X[:0], Y[:0])}, "no samples"),
        ({"data": (X[:4], Y[:4])}, "too few samples"),
        ({"data": (X.astype(object), Y)}, "array of object"),
        ({"data": (X.astype(np.int32), Y)}, "int32"),
        ({"data": (X.astype(np.complex64), Y)}, "complex64"),
        ({"data": (X[..., None], Y)}, "(5, 8, 8, 1)"),
        ({"data": (X[:, :0], Y)}, "(0, 8, 8)"),
        ({"data": ([X[0], X[0, :2]] * 20, Y)}, "differ in shape"),
        ({"data": Pairs([*X[:39], X[0, :2]], Y)}, "sample 39"),
        ({"data": (X, Y), "test": (X[:, :2], Y)}, "train and test differ in sample shape"),
        ({"data": (X, Y), "validation": ((X > 0).astype(np.uint8), Y)}, "train and validation differ in type"),
        ({"data": ((X, Y), (X, Y))}, "test=(x_test, y_test)"),
        ({"data": 5}, "not a data set"),
        ({"data": {"train": (X, Y), "dev": (X, Y)}}, "'dev'"),
        ({"data": {"train": (X, Y), "test": (X, Y)}, "test": (X, Y)}, "given twice"),
        ({"data": (X, Y), "data_dir": "data"}, "given twice"),
        ({"data": "shapes", "test": (X, Y)}, "belongs to data that is an object"),
        ({"test": (X, Y)}, "belongs to data that is an object"),
        ({"data": lambda: 5, "test": (X, Y)}, "belongs to data that is an object"),
        ({"data": (X, Y), "transform": 3}, "not a function"),
        ({"data": (X, Y), "transform": lambda sample: sample / nothing}, "NameError"),  # type: ignore[name-defined]  # noqa: F821
        ({"data": lambda colour: colour}, "colour"),
        ({"data": lambda: 1 / 0}, "ZeroDivisionError"),
        ({"data": lambda: 5}, "returned something else"),
        ({"data": (X, Y), "global_batch_size": 64}, "larger than the training set"),
        ({"data": (X, Y), "policy": "randaugment"}, "uint8 images"),
        ({"data": ((X * 9).astype(np.uint8), Y), "policy": "randaugment"}, "1 or 3 channels"),
        ({"data": (X, Y), "validation": (X, Y), "train_split": 0.5}, "validation set of its own"),
        ({"data": (X, Y), "name": "a/b"}, "name of a run"),
        ({"data": (X, Y), "name": "config"}, "name of a run"),
    ],
)
def test_bad_input_gives_one_screen_and_leaves_no_files(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    # A sample that differs from the first is an error in the data.
    with pytest.raises(DataError if isinstance(given.get("data"), Pairs) else UserError) as caught:
        paceline.train(model="cnn", processes=1, **{**QUICK, "global_batch_size": 16, **given})
    screen = caught.value.screen()
    assert said in screen
    assert 2 <= len(screen.splitlines()) <= 8
    assert list(tmp_path.iterdir()) == []


def test_a_refused_call_leaves_no_files_in_a_named_folder(tmp_path: Path) -> None:
    flags = {**QUICK, "global_batch_size": 16, "processes": 1}
    with pytest.raises(UserError):
        paceline.train(model="cnn", data=(NAN, Y), output_dir="mine", **flags)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError):  # the model of the ranks refuses vectors
        paceline.train(
            model="cnn", data=(X.reshape(40, -1), Y), output_dir="mine", **{**QUICK, "global_batch_size": 16}
        )
    assert not (tmp_path / "mine" / "arrays").exists()


def test_data_larger_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake memory: a machine in a test has enough for small arrays."""
    small = type(gather_memory())(**{**vars(gather_memory()), "total_bytes": 1000, "limit_bytes": None})
    monkeypatch.setattr(data_objects, "gather_memory", lambda: small)
    with pytest.raises(UserError) as caught:
        paceline.train(model="cnn", data=(X, Y), processes=1, **{**QUICK, "global_batch_size": 16})
    assert "memory" in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_a_running_run_keeps_its_arrays(trained: paceline.Run, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with folder.owned(), pytest.raises(UserError):
        paceline.train(model="cnn", data=made("float", 200), output_dir=folder.path, processes=1, **QUICK)
    assert not (folder.path / "arrays").exists()


def test_a_plan_of_arrays_has_the_numbers_of_the_run(trained: paceline.Run, tmp_path: Path) -> None:
    flags = {name: value for name, value in QUICK.items() if name != "quiet"}
    plan = paceline.plan(model="cnn", data=made("float", 200), processes=1, **flags)
    assert plan.total_steps == trained.results["steps"]
    assert plan.input_shape == (5, 8, 8)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["float", "uint8"])
def test_an_export_of_other_channels_gives_the_runs_logits(kind: str, tmp_path: Path) -> None:
    """The code on its card also works: samples of five channels are not pictures."""
    x, y = made("float", 80)
    if kind == "uint8":
        x = (x * 20 + 100).clip(0, 255).astype(np.uint8)
    run = paceline.train(model="cnn", data=(x, y), processes=1, max_steps=2, output_dir="run", **QUICK)
    folder = run.export("torch.export", tmp_path / "exported")
    inputs = torch.from_numpy(x[:4]).float()
    if kind == "uint8":
        how = json.loads((folder / "preprocessing.json").read_text())
        mean, std = (torch.tensor(how[name]).view(1, -1, 1, 1) * 255 for name in ("mean", "std"))
        inputs = (inputs - mean) / std
    found = torch.export.load(folder / "model.pt2").module()(inputs)
    assert torch.allclose(found, run.predict(x[:4], logits=True), atol=1e-5)  # another memory layout
    snippet = (folder / "card.md").read_text().partition("```python\n")[2].partition("```")[0]
    answer = command(sys.executable, "-c", snippet, cwd=folder)
    assert answer.out.strip() in CLASSES, answer.err


NOTEBOOK = """```python
import paceline, torch

table = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))

def make():
    return (table, table.sum(1) > 0), (table[:20], table[:20].sum(1) > 0)

flags = dict(processes=1, global_batch_size=16, epochs=1, track=(), quiet=True)
run = paceline.train(model="mlp", data=make, **flags)
print(run.config.data.dataset, run.predict(table[:1])[0].label in ("False", "True"))
```
"""


def test_a_data_function_of_a_notebook_may_use_tensors(tmp_path: Path) -> None:
    """It cannot be written as source, so the notebook calls it."""
    (tmp_path / "cells.md").write_text(NOTEBOOK)
    code = "from harness.cells import main; main('cells.md')"
    tests = str(Path(__file__).resolve().parents[1])
    answer = command(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=tests)
    assert answer.out.split() == ["arrays", "True"], answer.err
