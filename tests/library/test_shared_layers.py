"""Instances of nn.Module that a rank cannot rebuild exactly are refused; a layer that is used twice is rebuilt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.errors import UserError
from paceline.library.modules import check_module, constructor_arguments


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight


class Scaled(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3), persistent=False)


def test_a_layer_that_is_used_twice_is_rebuilt_twice() -> None:
    relu = nn.ReLU()
    net = nn.Sequential(nn.Linear(4, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 2))
    check_module(net)
    _, layers, _ = constructor_arguments(net)
    assert [type(layer) for layer in layers] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]


def shared_linear() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def changed_buffer() -> nn.Module:
    module = Scaled()
    module.scale.fill_(5)
    return module


def mixed_modes() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[1].eval()
    return net


@pytest.mark.parametrize("build", [Tied, shared_linear, changed_buffer, mixed_modes])
def test_what_cannot_be_rebuilt_is_refused(build: type[nn.Module]) -> None:
    with pytest.raises(UserError) as refused:
        check_module(build())
    assert "is not rebuilt" in str(refused.value.got)


X, Y = np.random.default_rng(0).normal(size=(40, 6)).astype("float32"), np.arange(40) % 3


@pytest.mark.long
@pytest.mark.parametrize("outputs", [2, 4, 5])
def test_another_number_of_outputs_than_classes_is_refused(tmp_path: Path, outputs: int) -> None:
    net = nn.Sequential(nn.Linear(6, outputs))
    settings: dict[str, Any] = {"global_batch_size": 8, "epochs": 1, "processes": 1, "track": (), "quiet": True}
    with pytest.raises(UserError):
        paceline.train(model=net, data=(X, Y), test=(X, Y), output_dir=tmp_path / "run", **settings)


def test_repeated_class_names_and_weights_are_refused() -> None:
    cases: tuple[dict[str, Any], ...] = (
        {"data": (X, Y), "classes": ["a", "b", "a"]},
        {"data": (X, Y, np.ones(40))},
    )
    for given in cases:
        with pytest.raises(UserError):
            paceline.plan(model="mlp", processes=1, global_batch_size=8, **given)
