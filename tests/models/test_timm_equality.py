"""Our vision transformer, LAMB and layers compared with timm's."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from harness.torchvision_shim import import_timm
from paceline.errors import UserError
from paceline.models.layers import number_layers, undecayed_parameters
from paceline.models.registry import build_model
from paceline.models.vit import ViT
from paceline.models.weights import load_matching
from paceline.settings.schema import ModelConfig, OptimConfig
from paceline.training.optim import build_optimizer


@pytest.fixture
def timm() -> Any:
    return import_timm()


def small_ones(timm: Any) -> tuple[ViT, nn.Module]:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2}
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes)
    return ViT("vit-ti16", (3, 32, 32), 5, patch_size=8, depth=2), theirs


def test_the_same_weights_give_the_same_logits(timm: Any) -> None:
    ours, theirs = small_ones(timm)
    report = load_matching(ours, theirs.state_dict())
    assert (report.skipped_shape, report.missing, report.unexpected) == ((), (), ())
    inputs = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        # Another order of sums.
        assert torch.allclose(ours.eval()(inputs), theirs.eval()(inputs), atol=1e-5)


def test_layers_and_weight_decay_are_those_of_timm(timm: Any) -> None:
    ours, theirs = small_ones(timm)
    # timm assigns the last norm to the last block. Ours is with the head, like everything after the blocks.
    assert number_layers(ours) == {**number_layers(theirs), "norm.weight": 3, "norm.bias": 3}
    assert undecayed_parameters(ours) == undecayed_parameters(theirs)


def test_lamb_takes_the_steps_of_timm(timm: Any) -> None:
    lamb = importlib.import_module("timm.optim").Lamb
    models = []
    for number in range(2):
        torch.manual_seed(1)
        model = nn.Linear(5, 3)
        config = OptimConfig(optimizer="lamb", base_lr=0.02, weight_decay=0.1)
        own = build_optimizer(config, model)
        other = lamb(model.parameters(), lr=0.02, weight_decay=0.1, max_grad_norm=None)
        optimizer = own if number == 0 else other
        inputs = torch.randn(6, 5)
        for _ in range(5):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        models.append(model)
    # Another order of operations.
    assert torch.allclose(models[0].weight, models[1].weight, rtol=1e-5)
    assert torch.allclose(models[0].bias, models[1].bias, rtol=1e-5)


def test_positions_of_a_timm_model_are_resized(timm: Any) -> None:
    _, saved = small_ones(timm)
    larger = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=48, patch_size=8, depth=2)
    assert load_matching(larger, saved.state_dict()).resized == ("pos_embed",)


def test_arguments_reach_a_timm_model(timm: Any) -> None:
    config = ModelConfig(model_name="timm:vit_tiny_patch16_224", model_args=("img_size=32", "patch_size=8", "depth=3"))
    built: Any = build_model(config, (3, 32, 32), 5)
    assert len(built.blocks) == 3
    with pytest.raises(UserError) as refused:
        build_model(ModelConfig(model_name="timm:resnet18", model_args=("depht=3",)), (3, 32, 32), 5)
    assert refused.value.where == "--model-args"


def test_arguments_reach_a_torchvision_model(timm: Any) -> None:
    config = ModelConfig(
        model_name="torchvision:resnet18", model_args=("width_per_group=64", "zero_init_residual=true")
    )
    built: Any = build_model(config, (3, 64, 64), 5)
    assert built.layer1[0].bn2.weight.abs().sum() == 0
    with pytest.raises(UserError) as refused:
        build_model(ModelConfig(model_name="torchvision:resnet18", model_args=("wide=1",)), (3, 64, 64), 5)
    assert refused.value.where == "--model-args"
