"""Weight decay and learning rate of each parameter, the start of the moving average, clipping and LAMB."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.models.layers import match_parameters, number_layers, undecayed_parameters
from paceline.models.resnet import ResNet
from paceline.settings.schema import OptimConfig
from paceline.training.clipping import clip_by_value, clip_units
from paceline.training.optim import MovingAverage, bare_step, build_optimizer, group_parameters, rate_factors


class Attentive(nn.Module):
    """A model with the parameter names of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
        self.patch_embed = nn.Conv2d(3, 4, 2)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)


def settings_by_name(config: OptimConfig, model: nn.Module) -> dict[str, tuple[float, float]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: (group["lr_factor"], group["weight_decay"])
        for group in group_parameters(config, model)
        for parameter in group["params"]
    }


def test_by_default_there_is_one_group() -> None:
    (group,) = build_optimizer(OptimConfig(), ResNet(18, (3, 32, 32), 10)).param_groups
    assert (group["lr_factor"], group["weight_decay"]) == (1.0, 5e-4)


def test_norms_biases_and_embeddings_have_no_weight_decay() -> None:
    model = Attentive()
    found = settings_by_name(OptimConfig(weight_decay=0.1, decay_norms_and_biases=False), model)
    decayed = {name for name, (_, decay) in found.items() if decay}
    assert decayed == {"patch_embed.weight", "blocks.0.1.weight", "blocks.1.1.weight", "head.weight"}
    assert undecayed_parameters(model) == found.keys() - decayed


def test_a_model_may_name_parameters_without_weight_decay() -> None:
    model = nn.Linear(2, 2)
    model.no_weight_decay = lambda: {"weight"}  # type: ignore[assignment]
    assert undecayed_parameters(model) == {"weight", "bias"}


def test_layers_are_numbered_from_the_stem_to_the_head() -> None:
    layers = number_layers(ResNet(18, (3, 32, 32), 10))
    assert (layers["conv1.weight"], layers["layer1.0.bn1.bias"], layers["layer4.1.conv2.weight"]) == (0, 1, 8)
    assert layers["fc.weight"] == 9
    attentive = number_layers(Attentive())
    assert attentive["pos_embed"] == attentive["patch_embed.bias"] == 0
    assert attentive["norm.weight"] == attentive["head.bias"] == max(attentive.values())


def test_a_parameter_between_blocks_belongs_to_the_block_before() -> None:
    model = nn.Module()
    model.first = nn.Sequential(nn.Linear(2, 2))
    model.norm = nn.LayerNorm(2)
    model.second = nn.Sequential(nn.Linear(2, 2))
    assert number_layers(model)["norm.weight"] == 1


def test_rates_decrease_from_the_head_to_the_stem() -> None:
    factors = rate_factors(OptimConfig(layer_decay=0.5, head_lr_factor=10.0), ResNet(18, (3, 32, 32), 10))
    assert factors["fc.weight"] == 10.0
    assert factors["layer4.1.bn2.weight"] == 0.5
    assert factors["conv1.weight"] == 0.5**9


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UserError) as refused:
        rate_factors(OptimConfig(layer_decay=0.5), nn.Linear(2, 2))
    assert refused.value.where == "--layer-decay"
    with pytest.raises(UserError) as refused:
        rate_factors(OptimConfig(head_lr_factor=2.0), nn.Conv2d(3, 3, 3))
    assert refused.value.where == "--head-lr-factor"


@pytest.mark.parametrize(
    ("pattern", "number"), [("layer1", 12), ("layer[12]", 27), ("*.bn1", 16), ("fc.bias", 1), ("conv1", 1)]
)
def test_patterns_match_parameters_and_modules(pattern: str, number: int) -> None:
    assert len(match_parameters(ResNet(18, (3, 32, 32), 10), [pattern])) == number


@pytest.mark.parametrize("patterns", [["layer5"], ["layer1", "fc.weigth"], ["*"], ["[!f]*", "fc"]])
def test_patterns_that_match_nothing_or_everything_are_refused(patterns: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        match_parameters(ResNet(18, (3, 32, 32), 10), patterns)
    assert (refused.value.where, bool(refused.value.allowed)) == ("--freeze", True)


def test_the_average_equals_the_weights_until_its_first_step() -> None:
    model = nn.Linear(2, 2, bias=False)
    average = MovingAverage(model, 0.9, first_step=3)
    for step in range(3):
        with torch.no_grad():
            model.weight.add_(1.0)
        average.update(step)
        assert torch.equal(average.values[0], model.weight)
    assert average.weight_at(3) == MovingAverage(model, 0.9).weight_at(0)


def test_clipping_by_value() -> None:
    gradient = torch.tensor([-3.0, -0.5, 0.0, 0.5, 3.0])
    clip_by_value([gradient], 1.0)
    assert gradient.tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]


def test_adaptive_clipping_limits_the_gradient_norm_of_each_unit() -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]]))
    weight.grad = torch.tensor([[30.0, 40.0], [3.0, 4.0], [0.06, 0.08]])
    bias = nn.Parameter(torch.tensor([3.0, 4.0]))
    bias.grad = torch.tensor([0.0, 10.0])
    clip_units([weight, bias], 0.1)
    lengths = weight.grad.norm(dim=1).tolist()
    assert lengths == pytest.approx([0.5, 1e-4, 0.1])  # clipped, clipped to the smallest norm, unchanged
    assert bias.grad.tolist() == pytest.approx([0.0, 0.5])


def lamb_by_hand(weights: list[float], gradients: list[list[float]], lr: float, decay: float) -> list[float]:
    """The algorithm of the paper in plain Python."""
    means, squares = [0.0] * len(weights), [0.0] * len(weights)
    for number, gradient in enumerate(gradients, start=1):
        updates = []
        for i, value in enumerate(gradient):
            means[i] = 0.9 * means[i] + 0.1 * value
            squares[i] = 0.999 * squares[i] + 0.001 * value * value
            direction = (means[i] / (1 - 0.9**number)) / (math.sqrt(squares[i] / (1 - 0.999**number)) + 1e-6)
            updates.append(direction + decay * weights[i])
        sizes = [math.sqrt(sum(x * x for x in values)) for values in (weights, updates)]
        ratio = sizes[0] / sizes[1] if decay and sizes[0] and sizes[1] else 1.0
        weights = [weight - lr * ratio * update for weight, update in zip(weights, updates, strict=True)]
    return weights


@pytest.mark.parametrize(("decay", "start"), [(0.1, [0.5, -1.0, 2.0]), (0.0, [0.5, -1.0, 2.0]), (0.1, [0.0, 0.0, 0.0])])
def test_lamb_takes_the_steps_of_the_paper(decay: float, start: list[float]) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([start]))
    optimizer = build_optimizer(OptimConfig(optimizer="lamb", base_lr=0.1, weight_decay=decay), model)
    gradients = [[0.1, -0.2, 0.3], [0.3, 0.1, -0.1], [0.0, 0.0, 0.5]]
    for gradient in gradients:
        model.weight.grad = torch.tensor([gradient])
        optimizer.step()
    # Single precision compared with double precision.
    assert model.weight[0].tolist() == pytest.approx(lamb_by_hand(start, gradients, 0.1, decay), rel=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adamw", "lamb"])
def test_a_learning_rate_may_be_a_tensor(kind: Any) -> None:
    """A recorded step has its rates in tensors."""
    config = OptimConfig(optimizer=kind, layer_decay=0.5, decay_norms_and_biases=False)
    models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)) for _ in range(2)]
    models[1] = copy.deepcopy(models[0])
    for model, as_rate in zip(models, (float, torch.tensor), strict=True):
        optimizer = build_optimizer(config, model)
        for group in optimizer.param_groups:
            group["lr"] = as_rate(0.25 * group["lr_factor"])  # type: ignore[operator]
        for _ in range(2):
            total: Tensor = model(torch.ones(4, 3)).square().sum()
            total.backward()
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_layer_that_is_first_used_later_gets_the_bits_of_a_first_step() -> None:
    """torch's fused SGD fails if only some parameters of a group have a momentum."""
    late, alone = (nn.Linear(2, 2, bias=False) for _ in range(2))
    late.load_state_dict(alone.state_dict())
    early = nn.Linear(2, 2, bias=False)
    config = OptimConfig(optimizer="nesterov", base_lr=0.1)
    steps = [
        bare_step(build_optimizer(config, nn.ModuleList([early, late]))),
        bare_step(build_optimizer(config, alone)),
    ]
    early.weight.grad = torch.ones(2, 2)
    steps[0]()
    late.weight.grad = alone.weight.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for step in steps:
        step()
    assert torch.equal(late.weight, alone.weight)
