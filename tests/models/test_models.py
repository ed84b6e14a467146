"""The built-in models: shapes, sizes, names and initial weights, compared with torchvision if it is installed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.torchvision_shim import import_torchvision
from paceline.errors import UserError
from paceline.models.pooling import MaxPool2x2, max_pool_2x2
from paceline.models.registry import BUILT_IN, PUBLISHED_NAMES, build_model, check_model_name
from paceline.models.vgg import pool_to_grid
from paceline.settings.schema import ModelConfig

# Published totals at 1000 classes and 224-pixel images.
PARAMETERS = {
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
}
IMAGENET = (3, 224, 224)
CIFAR = (3, 32, 32)


def build(name: str, input_shape: tuple[int, ...], num_classes: int = 10, **options: Any) -> nn.Module:
    return build_model(ModelConfig(model_name=name, **options), input_shape, num_classes)


def build_on_meta(name: str, input_shape: tuple[int, ...], num_classes: int = 10, **options: Any) -> nn.Module:
    with torch.device("meta"):
        config = ModelConfig(model_name=name, **options)
        return build_model(config, input_shape, num_classes, load_weights=False)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_published_models_have_the_published_size(name: str, parameters: int) -> None:
    model = build_on_meta(name, IMAGENET, 1000)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert count(model) == parameters


def test_mlp_has_the_documented_layers() -> None:
    expected = (784 * 256 + 256) + (256 * 128 + 128) + (128 * 10 + 10)
    assert count(build_on_meta("mlp", (784,))) == expected
    assert count(build_on_meta("mlp", (1, 28, 28))) == expected


def test_cnn_has_the_documented_layers() -> None:
    convolutions = (3 * 9 + 1) * 16 + (16 * 9 + 1) * 32 + (32 * 9 + 1) * 64
    model = build_on_meta("cnn", CIFAR)
    assert count(model) == convolutions + (64 * 4 * 4 + 1) * 512 + (512 + 1) * 10
    assert not list(model.buffers()), "the cnn has no BatchNorm"


@pytest.mark.parametrize(
    ("name", "input_shape"),
    [
        ("mlp", (784,)),
        ("mlp", (1, 28, 28)),
        *(("cnn", shape) for shape in [(3, 8, 8), (1, 28, 28), (4, 9, 31), IMAGENET]),
        *((name, shape) for name in PUBLISHED_NAMES for shape in [CIFAR, (1, 33, 65), IMAGENET]),
        *((name, (1, 28, 28)) for name in PUBLISHED_NAMES if name.startswith("resnet")),
    ],
)
def test_logits_have_one_row_per_sample(name: str, input_shape: tuple[int, ...]) -> None:
    logits = build_on_meta(name, input_shape, 7)(torch.empty(2, *input_shape, device="meta"))
    assert logits.shape == (2, 7)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18"])
def test_every_parameter_of_real_models_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, CIFAR)
    logits = model(torch.randn(4, *CIFAR))
    F.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


def test_equal_seeds_make_equal_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(build("cnn", CIFAR).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(("name", "dropouts"), [("mlp", 2), ("cnn", 1), ("vgg11", 2)])
def test_dropout_is_the_configured_one(name: str, dropouts: int) -> None:
    model = build_on_meta(name, CIFAR, dropout=0.25)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25] * dropouts


def test_hidden_size_is_the_width_of_the_mlp() -> None:
    model = build_on_meta("mlp", (784,), hidden_size=64)
    widths = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    assert widths == [64, 32, 10]


def test_cnn_names_expected_and_given_shape() -> None:
    with pytest.raises(ValueError, match=r"expects samples of shape \(3, 32, 32\), got \(3, 28, 28\)"):
        build("cnn", CIFAR)(torch.zeros(2, 3, 28, 28))


def test_cnn_compiles_into_one_graph() -> None:
    model = build("cnn", CIFAR).eval()
    x = torch.randn(2, *CIFAR)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize(("name", "input_shape"), [("cnn", (3, 7, 32)), ("vgg16", (1, 28, 28))])
def test_images_that_are_too_small_are_a_user_error(name: str, input_shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="too small"):
        build_on_meta(name, input_shape)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "mlp"])
def test_only_the_mlp_accepts_vectors(name: str) -> None:
    with pytest.raises(UserError, match="needs images") as caught:
        build_on_meta(name, (784,))
    assert "mlp" in caught.value.screen()


@pytest.mark.parametrize(("side", "kernel", "after_stem"), [(64, 3, 64), (65, 7, 17), (224, 7, 56)])
def test_resnet_stem_follows_the_image_size(side: int, kernel: int, after_stem: int) -> None:
    model = build_on_meta("resnet18", (3, side, side))
    assert model.conv1.weight.shape == (64, 3, kernel, kernel)
    images = torch.empty(1, 3, side, side, device="meta")
    assert model.maxpool(model.conv1(images)).shape[-1] == after_stem


@pytest.mark.parametrize("side", [1, 2, 7, 10])
def test_pooling_shortcuts_equal_adaptive_pooling(side: int) -> None:
    x = torch.randn(2, 5, side, side)
    assert torch.equal(pool_to_grid(x), F.adaptive_avg_pool2d(x, (7, 7)))


@pytest.mark.parametrize("side", [6, 7])
def test_max_pooling_equals_torchs_on_a_cpu(side: int) -> None:
    x = torch.randn(2, 5, side, side).contiguous(memory_format=torch.channels_last).requires_grad_()
    assert torch.equal(MaxPool2x2()(x), F.max_pool2d(x, 2))
    assert torch.equal(max_pool_2x2(x.detach()), F.max_pool2d(x, 2))


def test_vgg_pools_before_relu_and_gives_the_bits_of_the_usual_order() -> None:
    torch.manual_seed(0)
    model, x = build("vgg11", CIFAR, dropout=0.0), torch.randn(4, *CIFAR)
    features: Any = model.features
    ours = list(features)
    usual = list(ours)  # torchvision's order: convolution, ReLU, pool
    for number, layer in enumerate(ours):
        if isinstance(layer, MaxPool2x2):
            usual[number : number + 2] = reversed(ours[number : number + 2])
    assert [type(layer) for layer in usual[-3:]] == [nn.Conv2d, nn.ReLU, MaxPool2x2]
    gradients = []
    for layers in (ours, usual):
        model.zero_grad()
        hidden = nn.Sequential(*layers)(x)
        hidden.square().sum().backward()
        gradients.append([hidden, *(parameter.grad for parameter in model.features.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_resnet_convolutions_start_he_normal_over_the_fan_out() -> None:
    torch.manual_seed(0)
    weight = build("resnet18", CIFAR).layer4[1].conv2.weight
    # 2.4 million draws: the deviation of the sample is within a fraction of a percent of the formula.
    assert weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)


def test_vgg_has_the_documented_initial_weights() -> None:
    torch.manual_seed(0)
    model = build("vgg11", CIFAR)
    # Millions of draws in both layers, as above.
    assert model.classifier[3].weight.std().item() == pytest.approx(0.01, rel=0.01)
    assert model.features[18].weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_names_and_shapes_equal_torchvisions(name: str) -> None:
    torchvision = import_torchvision()
    with torch.device("meta"):
        theirs = torchvision.models.get_model(name).state_dict()
    ours = build_on_meta(name, IMAGENET, 1000).state_dict()
    assert [(key, t.shape, t.dtype) for key, t in ours.items()] == [
        (key, t.shape, t.dtype) for key, t in theirs.items()
    ]


@pytest.mark.parametrize("name", PUBLISHED_NAMES)
def test_logits_equal_torchvisions(name: str) -> None:
    """Bit for bit: one seed gives both the same initial weights, and the forward passes have the same operations."""
    torchvision = import_torchvision()
    torch.manual_seed(0)
    theirs = torchvision.models.get_model(name).eval()
    torch.manual_seed(0)
    ours = build(name, IMAGENET, 1000, dropout=0.5).eval()
    state = ours.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in theirs.state_dict().items())
    sides = (224, 96, 32) if name.startswith("vgg") else (224, 96)  # small images use another resnet stem
    for side in sides:
        x = torch.randn(1, 3, side, side)
        with torch.no_grad():
            assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_names_are_accepted(name: str) -> None:
    check_model_name(name)


@pytest.mark.parametrize(
    ("name", "hint"), [("resnet81", "resnet18"), ("vgg", "vgg"), ("net.py", "net.py:build"), ("", None)]
)
def test_unknown_names_are_a_user_error(name: str, hint: str | None) -> None:
    with pytest.raises(UserError) as caught:
        check_model_name(name)
    assert "resnet50" in str(caught.value.allowed)
    assert hint is None or hint in str(caught.value.hint)


def test_the_registry_does_not_import_torch() -> None:
    program = (
        "import sys; from paceline.models.registry import check_model_name;"
        "check_model_name('resnet18'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
