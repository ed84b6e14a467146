"""Optimizers, their groups of parameters, and the moving average of the weights."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.models.layers import head_parameters, number_layers, undecayed_parameters
from paceline.parallel.parts import is_sharded, local_part
from paceline.settings.schema import OptimConfig
from paceline.training.lamb import Lamb
from paceline.training.muon import Muon


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The loop sets the learning rate before each step, in each group times its `lr_factor`."""
    _avoid_loading_the_compiler()
    if config.optimizer == "muon":
        return Muon(model, config.base_lr, config.momentum, config.weight_decay)
    groups = group_parameters(config, model)
    # One pass over everything, on any device. Sharded parameters have no such kernel.
    fused = not any(is_sharded(parameter) for group in groups for parameter in group["params"])
    if config.optimizer in ("sgd", "nesterov"):
        use_nesterov = config.optimizer == "nesterov" and config.momentum > 0
        return torch.optim.SGD(groups, config.base_lr, momentum=config.momentum, nesterov=use_nesterov, fused=fused)
    if config.optimizer == "lamb":
        return Lamb(groups, config.base_lr)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(groups, config.base_lr, fused=fused)


def group_parameters(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    """The trainable parameters, one group for each pair of weight decay and factor of the learning rate."""
    factors = rate_factors(config, model)
    undecayed = set() if config.decay_norms_and_biases else undecayed_parameters(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = 0.0 if name in undecayed else config.weight_decay
            groups.setdefault((factors[name], decay), []).append(parameter)
    return [
        {"params": parameters, "lr_factor": factor, "weight_decay": decay}
        for (factor, decay), parameters in groups.items()
    ]


def rate_factors(config: OptimConfig, model: nn.Module) -> dict[str, float]:
    """The factor of the learning rate of each parameter. UserError if the model has no such layers."""
    factors = dict.fromkeys((name for name, _ in model.named_parameters()), 1.0)
    if config.layer_decay != 1:
        layers = number_layers(model)
        last = max(layers.values())
        if len(set(layers.values())) < 2:
            raise UserError(
                "layer_decay needs a model with layers",
                where="--layer-decay",
                got="no nn.Sequential or nn.ModuleList of blocks in this model",
                hint="put the blocks into an nn.Sequential, or leave --layer-decay out",
            )
        factors = {name: config.layer_decay ** (last - layer) for name, layer in layers.items()}
    if config.head_lr_factor != 1:
        head = head_parameters(model)
        if not head:
            raise UserError(
                "head_lr_factor needs a model with a head",
                where="--head-lr-factor",
                got="neither a linear layer nor a 1x1 convolution at the end",
            )
        factors |= {name: factors[name] * config.head_lr_factor for name in head}
    return factors


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """An optimizer's update without torch's wrappers for hooks and for its compiler, which are not used here."""
    update = inspect.unwrap(type(optimizer).step)

    def step() -> None:
        with torch.no_grad():
            if isinstance(optimizer, torch.optim.SGD):
                _complete_momentum(optimizer)
            update(optimizer)

    return step


def _complete_momentum(optimizer: torch.optim.SGD) -> None:
    """Give a momentum of zeros to parameters that get their first gradient later than others.

    torch's fused SGD fails if some parameters of a group have a momentum and some do not. The first momentum is the
    gradient itself, and momentum * 0 + gradient has the same bits.
    """
    for group in optimizer.param_groups:
        used = [parameter for parameter in group["params"] if parameter.grad is not None]
        missing = [parameter for parameter in used if optimizer.state[parameter].get("momentum_buffer") is None]
        if group["momentum"] and missing and len(missing) < len(used):
            for parameter in missing:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)


def _avoid_loading_the_compiler() -> None:
    """Prevent that the first optimizer loads torch's compiler, which takes a second.

    torch does it to exclude the optimizer from compilation. This is not needed if the compiler is not loaded.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            method.__dynamo_disable = method


def build_average(config: OptimConfig, model: nn.Module, steps_per_epoch: int) -> MovingAverage | None:
    if not config.ema_decay:
        return None
    return MovingAverage(model, config.ema_decay, first_step=round(config.ema_warmup_epochs * steps_per_epoch))


class MovingAverage:
    """An exponential moving average of a model's parameters (of this rank's shards, under FSDP).

    In the first steps the average follows the weights more closely, so the random initial weights lose their influence
    soon: the decay at step t is at most (1 + t) / (10 + t). Before `first_step` the average equals the weights.
    """

    def __init__(self, model: nn.Module, decay: float, first_step: int = 0) -> None:
        self._decay = decay
        self._first_step = first_step
        self._names = [name for name, _ in model.named_parameters()]
        self._live = list(model.parameters())
        self.values = [parameter.detach().clone() for parameter in self._live]

    def update(self, step: int) -> None:
        self.blend(self.weight_at(step))

    def weight_at(self, step: int) -> float:
        """The share of the live weights in the new average."""
        if step < self._first_step:
            return 1.0
        counted = step - self._first_step
        return 1 - min(self._decay, (1 + counted) / (10 + counted))

    @torch.no_grad()
    def blend(self, weight: float | Tensor) -> None:
        if isinstance(weight, Tensor):
            for value, live in zip(_local(self.values), _local(self._live), strict=True):
                value.lerp_(live, weight)
        else:
            torch._foreach_lerp_(_local(self.values), _local(self._live), weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the average and the live weights, to evaluate with the average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the current weights."""
        torch._foreach_copy_(_local(self.values), _local(self._live))

    def take_over(self) -> None:
        """After training: the average becomes the model."""
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for live, average in zip(_local(self._live), _local(self.values), strict=True):
            held = live.clone()
            live.copy_(average)
            average.copy_(held)

    def named_values(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self.values, strict=True))


def _local(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [local_part(tensor.detach()) for tensor in tensors]
