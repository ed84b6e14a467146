"""Initial weights: which are loaded, skipped and refused, without executing code."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.errors import EXIT_DATA, DataError, UserError
from paceline.models import weights
from paceline.models.published import PUBLISHED
from paceline.models.registry import PUBLISHED_NAMES, build_model, check_weights
from paceline.settings.schema import ModelConfig

CIFAR = (3, 32, 32)


def build(name: str, path: object, *, num_classes: int = 10, shape: tuple[int, ...] = CIFAR) -> nn.Module:
    return build_model(ModelConfig(model_name=name, weights=str(path)), shape, num_classes)


def fresh_state(name: str, *, num_classes: int = 10, shape: tuple[int, ...] = CIFAR) -> dict[str, Tensor]:
    return build(name, "none", num_classes=num_classes, shape=shape).state_dict()


def save(state: dict[str, Tensor], path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_weights_are_loaded_bit_for_bit(tmp_path: Path, suffix: str) -> None:
    saved = fresh_state("cnn")
    loaded = build("cnn", save(saved, tmp_path / f"model{suffix}")).state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": OrderedDict(state)},
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        lambda state: {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}},
    ],
)
def test_common_wrappings_are_understood(tmp_path: Path, wrap: Any) -> None:
    saved = fresh_state("mlp")
    torch.save(wrap(saved), tmp_path / "model.pth")
    loaded = build("mlp", tmp_path / "model.pth").state_dict()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_a_head_for_other_classes_is_skipped_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = fresh_state("cnn", num_classes=100)
    path = save(saved, tmp_path / "hundred.safetensors")
    with caplog.at_level(logging.INFO, logger="paceline"):
        model = build("cnn", path)
    loaded = model.state_dict()
    assert loaded["classifier.weight"].shape == (10, 512)
    assert all(torch.equal(loaded[n], saved[n]) for n in saved if not n.startswith("classifier."))
    assert caplog.messages == [
        "weights of hundred.safetensors: 8 of 10 tensors loaded; other shape: classifier.weight, classifier.bias"
    ]


def test_a_huge_head_does_not_make_the_file_a_wrong_one(tmp_path: Path) -> None:
    path = save(fresh_state("mlp", shape=(8,)), tmp_path / "model.pth")
    assert build("mlp", path, num_classes=20_000, shape=(8,)) is not None


def test_the_report_names_every_difference() -> None:
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 2)))
    tensors = {"body.weight": torch.ones(4, 4), "head.weight": torch.ones(3, 4), "other": torch.ones(1)}
    report = weights.load_matching(model, tensors)
    assert report == weights.LoadReport(
        loaded=("body.weight",),
        skipped_shape=("head.weight",),
        missing=("body.bias", "head.bias"),
        unexpected=("other",),
        resized=(),
    )
    assert report.summary() == (
        "1 of 4 tensors loaded; other shape: head.weight; not in the file: body.bias, head.bias; "
        "not in the model: other"
    )


@pytest.mark.parametrize(("file_of", "model"), [("mlp", "cnn"), ("resnet18", "resnet50"), ("resnet34", "resnet50")])
def test_weights_of_another_model_are_refused(tmp_path: Path, file_of: str, model: str) -> None:
    path = save(fresh_state(file_of), tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="does not belong") as caught:
        build(model, path)
    screen = caught.value.screen()
    assert str(path) in screen
    assert len(screen.splitlines()) < 10


def test_half_precision_files_fill_full_precision_models(tmp_path: Path) -> None:
    saved = {name: tensor.half() for name, tensor in fresh_state("mlp").items()}
    loaded = build("mlp", save(saved, tmp_path / "half.safetensors")).state_dict()
    assert all(torch.equal(loaded[name], saved[name].float()) for name in saved)


class Hostile:
    """A pickle that creates a file when it is executed."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_code_in_a_file_is_never_executed(tmp_path: Path, how: str) -> None:
    canary, path = tmp_path / "canary", tmp_path / "hostile.pth"
    content = {"state_dict": fresh_state("mlp"), "extra": Hostile(canary)}
    with path.open("wb") as file:
        if how == "torch":
            torch.save(content, file)
        else:
            pickle.dump(content, file)
    with pytest.raises(DataError, match="cannot be read") as caught:
        build("mlp", path)
    assert not canary.exists()
    assert caught.value.exit_code == EXIT_DATA
    assert len(caught.value.screen().splitlines()) < 10


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("content", [b"", b"not weights at all" * 50])
def test_garbage_is_a_data_error(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"garbage{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        build("cnn", path)
    assert str(path) in caught.value.screen()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_truncated_file_is_a_data_error(tmp_path: Path, suffix: str) -> None:
    path = save(fresh_state("mlp"), tmp_path / f"model{suffix}")
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError):
        build("mlp", path)


@pytest.mark.parametrize("content", [[torch.ones(2)], {"epoch": 3}, torch.ones(2)])
def test_a_file_without_named_tensors_is_a_data_error(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "other.pth")
    with pytest.raises(DataError, match="no named tensors"):
        build("mlp", tmp_path / "other.pth")


def test_a_missing_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        build("mlp", tmp_path / "nowhere.pth")
    with pytest.raises(DataError, match="cannot be opened"):
        weights.read_tensors(tmp_path / "nowhere.pth")


def test_mistyped_weights_are_a_user_error() -> None:
    with pytest.raises(UserError) as caught:
        check_weights(ModelConfig(model_name="resnet18", weights="imagnet"))
    assert caught.value.hint == "did you mean imagenet?"


@pytest.mark.parametrize("name", ["mlp", "cnn", "net.py:build", "package.module:build"])
def test_only_published_models_have_imagenet_weights(name: str) -> None:
    with pytest.raises(UserError, match="no published ImageNet weights"):
        check_weights(ModelConfig(model_name=name, weights="imagenet"))


def test_every_published_name_has_its_file() -> None:
    assert tuple(PUBLISHED) == PUBLISHED_NAMES


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that replaces torchvision's server, and an empty cache."""
    server = tmp_path / "server"
    server.mkdir()
    monkeypatch.setattr(weights, "PUBLISHED_AT", server.as_uri())
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return server


def test_imagenet_weights_are_fetched_verified_and_kept(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = fresh_state("resnet18", num_classes=1000, shape=(3, 224, 224))
    made = save(saved, tmp_path / "made.pth")
    name = f"resnet18-{hashlib.sha256(made.read_bytes()).hexdigest()[:8]}.pth"
    made.rename(published / name)
    monkeypatch.setitem(PUBLISHED, "resnet18", name)

    loaded = build("resnet18", "imagenet").state_dict()
    skipped = {key for key in saved if not torch.equal(loaded[key], saved[key])}
    assert skipped == {"conv1.weight", "fc.weight", "fc.bias"}, "the small stem and the head are initialised here"
    assert (tmp_path / "cache" / "weights" / name).is_file()

    (published / name).unlink()
    again = build("resnet18", "imagenet", num_classes=1000, shape=(3, 224, 224)).state_dict()
    assert all(torch.equal(again[key], saved[key]) for key in saved)


@pytest.mark.parametrize("tampered", [True, False])
def test_unavailable_imagenet_weights_name_the_alternatives(published: Path, tmp_path: Path, tampered: bool) -> None:
    if tampered:
        (published / PUBLISHED["resnet18"]).write_bytes(b"something else")
    with pytest.raises(DataError) as caught:
        build("resnet18", "imagenet")
    screen = caught.value.screen()
    cached = tmp_path / "cache" / "weights" / PUBLISHED["resnet18"]
    for part in (published.as_uri(), str(cached), "--weights PATH", "--weights none"):
        assert part in screen
    assert not cached.exists()


def test_no_weights_are_fetched_to_count_parameters(published: Path) -> None:
    with torch.device("meta"):
        config = ModelConfig(model_name="vgg19", weights="imagenet")
        assert build_model(config, (3, 224, 224), 10, load_weights=False) is not None
