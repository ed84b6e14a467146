"""A forged record of a run: one screen and the exit code of checkpoints, before memory is allocated."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import paceline
from harness.forged import reseal, rewrite_state
from paceline.cli.main import main
from paceline.errors import CheckpointError

CHECKPOINT = 4
Record = dict[str, Any]


def forge(home: Path, change: Callable[[Record], object]) -> None:
    for checkpoint in (home / "run/checkpoints").glob("step-*"):
        rewrite_state(checkpoint, lambda values: change(values["record"]))


def shapes(*shape: int) -> Callable[[Record], object]:
    def change(record: Record) -> None:
        record["data"]["sample_shape"] = list(shape)
        record["preprocessing"]["raw_shape"] = list(shape)

    return change


def both(name: str, values: list[Any]) -> Callable[[Record], object]:
    def change(record: Record) -> None:
        record["data"][name] = record["preprocessing"][name] = values

    return change


FORGED: dict[str, Callable[[Record], object]] = {
    "no model name": lambda record: record["model"].update(model_name=""),
    "an unknown model": lambda record: record["model"].update(model_name="x"),
    "another model": lambda record: record["model"].update(model_name="resnet18"),
    "a function without source": lambda record: record["model"].update(model_name="os:abort"),
    "a huge hidden layer": lambda record: record["model"].update(model_name="mlp", hidden_size=2**31),
    "no std": both("std", []),
    "no mean": both("mean", []),
    "std of zero": both("std", [0.0, 0.0, 0.0]),
    "std longer than mean": both("std", [0.1] * 4),
    "mean of one channel": both("mean", [0.1]),
    "a mean that is no number": both("mean", [float("nan")] * 3),
    "other channels": shapes(4, 32, 32),
    "one channel": shapes(1, 32, 32),
    "samples and preprocessing differ": lambda record: record["preprocessing"].update(raw_shape=[3, 64, 64]),
    "huge pictures": shapes(3, 2**31, 2**31),
    "large pictures": shapes(3, 100_000, 100_000),
    "pictures of a pixel": shapes(3, 1, 1),
    "vectors": shapes(3072),
    "four dimensions": shapes(3, 32, 32, 1),
    "no dimension": shapes(),
    "two classes": lambda record: record["data"].update(classes=["a", "b"]),
    "no classes": lambda record: record["data"].update(classes=[]),
    "many classes": lambda record: record["data"].update(classes=[str(n) for n in range(1_000_000)]),
    "too many classes": lambda record: record["data"].update(classes=["x"] * 1_000_001),
    "an unknown pipeline": lambda record: record["preprocessing"].update(kind="x"),
    "a huge crop": lambda record: record["preprocessing"].update(kind="imagenet", image_size=2**50),
    "a crop of nothing": lambda record: record["preprocessing"].update(kind="imagenet", image_size=0),
    "a resized pixel": lambda record: (
        shapes(3, 1, 20_000_000)(record),
        record["preprocessing"].update(kind="imagenet"),
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_record_is_refused_by_every_reader(name: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forge(home, FORGED[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for words in (["predict", "run", "picture.png"], ["evaluate", "run"], ["export", "run", "--format=safetensors"]):
        assert main(words) == CHECKPOINT, (words, capsys.readouterr().err)
        screen = capsys.readouterr().err
        assert "state.json" in screen or "checkpoints" in screen
        assert len(screen) < 2000
    run = paceline.load_run(home / "run")
    for use in (run.model, run.evaluate, lambda: run.predict(home / "picture.png"), run.export):
        with pytest.raises(CheckpointError):
            use()
    # 500 MB: a million class names need some of it.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


def test_names_of_classes_are_printed_safely(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name may contain terminal escape sequences."""
    forge(
        home,
        lambda record: record["data"].update(classes=[f"\x1b[{n}J" for n in range(len(record["data"]["classes"]))]),
    )
    assert main(["predict", "run", "picture.png"]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b[" in shown
    assert "\x1b" not in shown


def test_weights_with_nan_are_not_exported(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for checkpoint in (home / "run/checkpoints").glob("step-*"):
        for file in checkpoint.glob("*.safetensors"):
            tensors = {
                name: torch.full_like(value, float("nan")) if value.is_floating_point() else value
                for name, value in load_file(file).items()
            }
            save_file(tensors, file)
        reseal(checkpoint)
    assert main(["export", "run", "--format=safetensors"]) == CHECKPOINT
    assert "finite" in capsys.readouterr().err
    assert not (home / "run/export-safetensors").exists()
