"""A run folder is complete: predict, export and run.model() need neither the data nor the source of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import paceline
from harness.cli import paceline as run_command
from harness.forged import rewrite_state
from paceline.cli.main import main
from paceline.errors import CheckpointError, DataError, UserError
from paceline.training.reuse import evaluate_run, open_run

USER, DATA, CHECKPOINT = 2, 3, 4
FLAGS = ["--augment=none", "--epochs=2", "--global-batch-size=8", "--processes=1", "--num-workers=0", "--track"]
FUNCTIONS = """\
from pathlib import Path

import numpy as np

import own_layers


def build(num_classes, input_shape):
    import own_parts.head

    return own_parts.head.join(own_layers.body(input_shape), num_classes)


def data(data_dir):
    samples = np.load(Path(data_dir) / "x.npy")
    labels = np.arange(len(samples)) % 3
    return (samples[:48], labels[:48]), (samples[48:], labels[48:]), ["red", "green", "blue"]


def own_loss(logits, labels):
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits, labels)
"""
LAYERS = """\
from torch import nn


def body(input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], 16), nn.ReLU())
"""
HEAD = """\
from torch import nn

from .names import WIDTH


class Joined(nn.Module):
    def __init__(self, body, num_classes):
        super().__init__()
        self.body, self.head = body, nn.Linear(WIDTH, num_classes)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def join(body, num_classes):
    return Joined(body, num_classes)
"""


def state(home: Path) -> dict[str, str]:
    return {"PACELINE_STATE": str(home / "state"), "PYTHONPATH": str(home / "source")}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a folder of pictures of two classes."""
    home = tmp_path_factory.mktemp("pictures")
    draw = np.random.default_rng(0)
    for name, low in (("cat", 0), ("dog", 90)):
        (home / "two" / name).mkdir(parents=True)
        for number in range(24):
            pixels = draw.integers(low, low + 160, (36, 36, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(home / "two" / name / f"{number}.png")
    shutil.copy(home / "two" / "cat" / "0.png", home / "picture.png")
    flags = ["--dataset=folder", "--data-dir=two", "--image-size=32", *FLAGS, "--output-dir=run"]
    answer = run_command("train", "shapes-cnn", *flags, cwd=home)
    assert answer.code == 0, answer.err
    return home


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model, loss and data are functions of a file that imports other files of the user."""
    home = tmp_path_factory.mktemp("functions")
    source = home / "source"
    (source / "own_parts").mkdir(parents=True)
    (source / "own.py").write_text(FUNCTIONS)
    (source / "own_layers.py").write_text(LAYERS)
    (source / "own_parts" / "__init__.py").write_text("")
    (source / "own_parts" / "head.py").write_text(HEAD)
    (source / "own_parts" / "names.py").write_text("WIDTH = 16\n")
    (home / "data").mkdir()
    np.save(home / "data" / "x.npy", samples(seed=1))
    flags = ["--model-name=source/own.py:build", "--dataset=source/own.py:data", "--loss=source/own.py:own_loss"]
    answer = run_command(
        *("train", "shapes-cnn", *flags, "--data-dir=data", *FLAGS, "--output-dir=run"), cwd=home, env=state(home)
    )
    assert answer.code == 0, answer.err
    return home


def samples(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256 // seed, (64, 3, 8, 8), dtype=np.uint8)


def copy_of(home: Path, target: Path) -> Path:
    """A copy of a run's home folder, for changes."""
    return shutil.copytree(home, target / "home", symlinks=True)


def probabilities(run: Path, images: Any, *, trust_code: bool = False) -> list[dict[str, float]]:
    answers = paceline.load_run(run, trust_code=trust_code).predict(images)
    return [answer.probabilities for answer in answers]


def test_a_renamed_class_folder_changes_no_prediction(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = copy_of(pictures, tmp_path)
    monkeypatch.chdir(home)

    def labelled() -> tuple[str, list[dict[str, float]], str]:
        assert main(["predict", "run", "picture.png"]) == 0
        shown = capsys.readouterr().out
        assert main(["export", "run", "--format=safetensors", "--force"]) == 0
        capsys.readouterr()
        labels = Path("run/export-safetensors/labels.txt").read_text()
        return shown, probabilities(home / "run", home / "picture.png"), labels

    before = labelled()
    (home / "two" / "cat").rename(home / "two" / "zcat")
    assert labelled() == before
    shutil.rmtree(home / "two")
    assert labelled() == before


def test_overwritten_data_changes_no_prediction(functions: Path, tmp_path: Path) -> None:
    """Mean and standard deviation are those of the training. New processes are used, because each reads data once."""
    home = copy_of(functions, tmp_path)
    for number, pixels in enumerate(samples(seed=3)[:5]):
        Image.fromarray(pixels.transpose(1, 2, 0)).save(home / f"{number}.png")
    words = ["predict", "run", *(f"{number}.png" for number in range(5))]
    before = run_command(*words, cwd=home, env=state(home))
    assert before.code == 0, before.err
    np.save(home / "data" / "x.npy", samples(seed=4))
    after = run_command(*words, cwd=home, env=state(home))
    assert after.out == before.out


def exported(run: Path, output: Path, name: str) -> dict[str, torch.Tensor]:
    """The weights in an export."""
    assert main(["export", str(run), f"--format={name}", f"--output={output}", "--trust-code"]) == 0
    if name == "safetensors":
        return load_file(output / "model.safetensors")
    return dict(torch.export.load(output / "model.pt2").state_dict)


def test_a_run_in_an_empty_root_predicts_and_exports_the_same_bits(
    functions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data and source are missing. Another machine has no key, so the code needs --trust-code."""
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copytree(functions / "run", empty / "run", symlinks=True)
    images = samples(seed=3)[:5]
    monkeypatch.setenv("PACELINE_STATE", str(functions / "state"))
    before = probabilities(functions / "run", images)
    monkeypatch.setenv("PACELINE_STATE", str(empty / "state"))
    monkeypatch.chdir(empty)
    with pytest.raises(UserError) as refused:
        probabilities(empty / "run", images)
    assert "--trust-code" in refused.value.screen()
    assert probabilities(empty / "run", images, trust_code=True) == before
    Image.fromarray(images[0].transpose(1, 2, 0)).save(empty / "one.png")
    assert main(["predict", "run", "one.png", "--trust-code"]) == 0
    for name in ("safetensors", "torch.export"):
        there = exported(functions / "run", tmp_path / f"there-{name}", name)
        here = exported(empty / "run", tmp_path / f"here-{name}", name)
        assert capsys.readouterr().out.count("bit for bit") == 2
        assert there.keys() == here.keys()
        assert all(torch.equal(there[key], here[key]) for key in there)


def test_a_checkpoint_without_its_run_folder_is_complete(
    functions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user who trained it needs no --trust-code: this user's key has signed the source."""
    monkeypatch.setenv("PACELINE_STATE", str(functions / "state"))
    alone = shutil.copytree((functions / "run/checkpoints/best").resolve(), tmp_path / "alone")
    monkeypatch.chdir(tmp_path)
    assert open_run(alone, ["--device=cpu"]).classes == ("red", "green", "blue")


def test_modules_of_the_caller_are_not_replaced(functions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own_layers differs from the module that the caller has imported under this name."""
    import sys
    import types

    other = types.ModuleType("own_layers")
    monkeypatch.setitem(sys.modules, "own_layers", other)
    finders = list(sys.meta_path)
    paceline.load_run(functions / "run", trust_code=True).model()
    assert sys.modules["own_layers"] is other
    assert "own_parts" not in sys.modules
    assert sys.meta_path == finders


def test_tampered_source_is_refused(functions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for the user who trained the run and has the key."""
    home = copy_of(functions, tmp_path)
    monkeypatch.setenv("PACELINE_STATE", str(home / "state"))

    def tamper(values: dict[str, Any]) -> None:
        module = values["record"]["sources"]["modules"]["own_layers"]
        module["text"] = f"open({str(home / 'executed')!r}, 'w').close()\n{module['text']}"

    rewrite_state((home / "run/checkpoints/best").resolve(), tamper)
    for use in (lambda: open_run(home / "run", []), lambda: paceline.load_run(home / "run").model()):
        with pytest.raises(UserError) as refused:
            use()
        assert "--trust-code" in refused.value.screen()
    assert "executed" in paceline.load_run(home / "run").source()["own_layers (own_layers.py)"]
    assert not (home / "executed").exists()


def test_evaluate_refuses_other_data(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved data is the same data. Other pictures need --accept-new-data. Other classes are always refused."""
    home = copy_of(pictures, tmp_path)
    monkeypatch.chdir(home)
    (home / "two").rename(home / "moved")
    moved = ["--device=cpu", "--data-dir=moved"]
    before = evaluate_run(open_run(home / "run", moved))
    assert before.accuracy == json.loads((home / "run/results.json").read_text())["test_accuracy"]
    shutil.copy(home / "moved" / "dog" / "1.png", home / "moved" / "cat" / "another.png")
    with pytest.raises(DataError) as refused:
        evaluate_run(open_run(home / "run", moved))
    assert "--accept-new-data" in refused.value.screen()
    assert main(["evaluate", "run", *moved]) == DATA
    assert evaluate_run(open_run(home / "run", [*moved, "--accept-new-data"])).samples > 0
    (home / "moved" / "cat").rename(home / "moved" / "zcat")
    with pytest.raises(DataError):
        evaluate_run(open_run(home / "run", [*moved, "--accept-new-data"]))


def test_an_older_run_is_used_only_with_its_own_data(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint without a record takes classes and preprocessing from its data, if it is the same data."""
    home = copy_of(pictures, tmp_path)
    monkeypatch.chdir(home)
    with_record = probabilities(home / "run", home / "picture.png")
    for checkpoint in (home / "run/checkpoints").glob("step-*"):
        rewrite_state(checkpoint, lambda values: values.pop("record"))
    assert probabilities(home / "run", home / "picture.png") == with_record
    (home / "two" / "cat").rename(home / "two" / "zcat")
    with pytest.raises(CheckpointError) as refused:
        probabilities(home / "run", home / "picture.png")
    assert "class names" in str(refused.value.got)
    shutil.rmtree(home / "two")
    capsys.readouterr()
    assert main(["predict", "run", "picture.png"]) == CHECKPOINT
    assert "--data-dir" in capsys.readouterr().err


@pytest.mark.parametrize("forged", [None, 3, {}, {"schema_version": 99}, {"schema_version": 1, "data": {}}])
def test_a_record_that_cannot_be_read_is_refused(forged: Any, pictures: Path, tmp_path: Path) -> None:
    home = copy_of(pictures, tmp_path)

    def forge(values: dict[str, Any]) -> None:
        values["record"] = forged

    for checkpoint in (home / "run/checkpoints").glob("step-*"):
        rewrite_state(checkpoint, forge)
    with pytest.raises(CheckpointError):
        open_run(home / "run", ["--device=cpu"])


def test_the_library_exports_lists_checkpoints_and_gives_logits(pictures: Path, tmp_path: Path) -> None:
    run = paceline.load_run(copy_of(pictures, tmp_path) / "run")
    logits = run.predict(pictures / "picture.png", logits=True)
    [answer] = run.predict(pictures / "picture.png")
    assert dict(zip(("cat", "dog"), logits.softmax(1)[0].tolist(), strict=True)) == answer.probabilities
    folder = run.export()
    assert sorted(load_file(folder / "model.safetensors")) == sorted(run.model().state_dict())
    with pytest.raises(UserError):
        run.export()
    assert run.export(output=tmp_path / "again") == tmp_path / "again"
    assert run.export(force=True) == folder
    with pytest.raises(UserError):
        run.export("onx")
    rows = run.checkpoints()
    assert [row["is_complete"] for row in rows] == [True] * len(rows)
    assert rows[-1]["step"] == run.results["steps"]
