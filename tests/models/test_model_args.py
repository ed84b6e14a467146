"""Arguments of a model: from the command line, a recipe and Python. They are in the record and in a run's identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import paceline
from harness.cli import paceline as run_paceline
from paceline.errors import UserError
from paceline.models.registry import build_model, check_model_args
from paceline.settings.load import load_config
from paceline.settings.schema import ModelConfig
from paceline.settings.syntax import parse_model_args, write_model_args

MODEL = """
from torch import nn

def build(num_classes, input_shape, width=4, names=("a",)):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, width), nn.ReLU(), nn.Linear(width, num_classes))
"""
QUICK: dict[str, Any] = {"num_samples": 200, "epochs": 1, "global_batch_size": 64, "processes": 1}
QUICK_FLAGS = ("--num-samples", "200", "--epochs", "1", "--global-batch-size", "64", "--processes", "1", "--track")


def test_values_are_converted() -> None:
    texts = ("a=1", "b=0.5", "c=true", "d=None", "e=relu", 'f="1"', "g=[1, 2]", "h=a=b", "i=")
    expected = {"a": 1, "b": 0.5, "c": True, "d": None, "e": "relu", "f": "1", "g": [1, 2], "h": "a=b", "i": ""}
    assert parse_model_args(texts) == expected
    assert parse_model_args(write_model_args(expected, "")) == expected
    with pytest.raises(UserError):
        write_model_args({"a": object()}, "here")


def test_a_recipe_may_hold_a_mapping_or_a_list(tmp_path: Path) -> None:
    for text in ("model_args: {depth: 2, drop_path: 0.1}", "model_args: [depth=2, drop_path=0.1]"):
        (tmp_path / "mine.yaml").write_text(text)
        assert load_config(str(tmp_path / "mine.yaml")).config.model.model_args == ("depth=2", "drop_path=0.1")


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
@pytest.mark.parametrize("argument", ["checkpoint_path=x.pth", "pretrained_cfg_overlay={}", "weights_backbone=DEFAULT"])
def test_arguments_cannot_name_files_of_weights(name: str, argument: str) -> None:
    """timm 1.0.9 reads a checkpoint_path with pickle: a run of another person would execute code."""
    with pytest.raises(UserError) as refused:
        check_model_args(ModelConfig(model_name=name, model_args=(argument,)))
    assert refused.value.got == argument.partition("=")[0]
    check_model_args(ModelConfig(model_name="own.py:build", model_args=(argument,)))  # a user's own function


def test_a_users_function_gets_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    name = f"{tmp_path / 'model.py'}:build"
    model = build_model(ModelConfig(model_name=name, model_args=("width=7",)), (3, 32, 32), 10)
    assert isinstance(model, nn.Sequential)
    assert sum(parameter.numel() for parameter in model.parameters()) == 7 * 3073 + 10 * 8
    with pytest.raises(UserError) as refused:
        build_model(ModelConfig(model_name=name, model_args=("widht=7",)), (3, 32, 32), 10)
    assert (refused.value.where, refused.value.allowed) == ("--model-args", "width, names")


@pytest.mark.parametrize("flags", [("--model-name", "cnn"), ("--model-name", "vit-ti16", "--model-args", "deep=3")])
def test_an_unknown_argument_gives_one_screen_and_no_run(tmp_path: Path, flags: tuple[str, ...]) -> None:
    arguments = flags if "--model-args" in flags else (*flags, "--model-args", "depth=3")
    answer = run_paceline("train", "shapes-cnn", *arguments, cwd=tmp_path)
    assert answer.code == 2
    assert "--model-args" in answer.err
    assert not (tmp_path / "runs").exists()


def test_python_passes_a_dict_and_the_record_rebuilds_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    name, folder = f"{tmp_path / 'model.py'}:build", tmp_path / "run"
    run = paceline.train(
        "shapes-cnn", model=name, model_args={"width": 6}, output_dir=folder, quiet=True, track=[], **QUICK
    )
    assert sum(parameter.numel() for parameter in run.model().parameters()) == 6 * 3073 + 10 * 7
    answer = run_paceline(
        *("train", "shapes-cnn", *QUICK_FLAGS, "--model-name", name, "--model-args", "width=5", "--epochs", "2"),
        *("--output-dir", str(folder), "--resume", "auto"),
        cwd=tmp_path,
    )
    assert answer.code == 4
    assert "model_args" in answer.err
