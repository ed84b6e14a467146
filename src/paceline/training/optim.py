"""Optimizers, and the moving average of the weights."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.parallel.parts import is_sharded, local_part
from paceline.settings.schema import OptimConfig
from paceline.training.muon import Muon


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """All trainable parameters in one group; the loop sets the learning rate before each step."""
    _avoid_loading_the_compiler()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = config.weight_decay
    # One pass over everything, on any device. Sharded parameters have no such kernel.
    fused = not any(is_sharded(parameter) for parameter in parameters)
    if config.optimizer in ("sgd", "nesterov"):
        use_nesterov = config.optimizer == "nesterov" and config.momentum > 0
        return torch.optim.SGD(
            parameters, config.base_lr, momentum=config.momentum, weight_decay=decay, nesterov=use_nesterov, fused=fused
        )
    if config.optimizer == "muon":
        return Muon(model, config.base_lr, config.momentum, decay)
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, config.base_lr, weight_decay=decay, fused=fused)
    return torch.optim.AdamW(parameters, config.base_lr, weight_decay=decay, fused=fused)


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """An optimizer's update without torch's wrappers for hooks and for its compiler, which are not used here."""
    update = inspect.unwrap(type(optimizer).step)

    def step() -> None:
        with torch.no_grad():
            update(optimizer)

    return step


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


class MovingAverage:
    """An exponential moving average of a model's parameters (of this rank's shards, under FSDP).

    In the first steps the average follows the weights more closely, so that the random initial weights do not count
    for long: the decay at step t is at most (1 + t) / (10 + t).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._names = [name for name, _ in model.named_parameters()]
        self._live = list(model.parameters())
        self.values = [parameter.detach().clone() for parameter in self._live]

    def update(self, step: int) -> None:
        self.blend(self.weight_at(step))

    def weight_at(self, step: int) -> float:
        """The share of the live weights in the new average."""
        return 1 - min(self._decay, (1 + step) / (10 + step))

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
