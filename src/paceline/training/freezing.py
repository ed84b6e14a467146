"""Parameters that are not trained: for the whole run, or until an epoch.

Parameters that stay frozen need no gradients. Parameters that are unfrozen later do: DDP and FSDP decide at the start
which gradients they exchange. Until then their gradients are computed and dropped before the norm and the update.
A normalisation layer whose parameters are frozen keeps its running statistics, too.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.models.layers import match_parameters
from paceline.parallel.parts import local_part
from paceline.runs.epoch_clock import EpochClock
from paceline.settings.schema import OptimConfig


class Freezing:
    """The frozen parameters of a model. Make it before the model is wrapped."""

    def __init__(self, config: OptimConfig, model: nn.Module, clock: EpochClock) -> None:
        self.names = match_parameters(model, config.freeze)
        self._until_step = clock.end_of(config.unfreeze_at - 1) if config.unfreeze_at else None
        if self._until_step is None:
            for name, parameter in model.named_parameters():
                if name in self.names:
                    parameter.requires_grad_(False)

    def holds_at(self, step: int) -> bool:
        """Whether the parameters are frozen in this step (counted from 0)."""
        return self._until_step is None or step < self._until_step

    def set_modes(self, model: nn.Module, step: int) -> None:
        """Let frozen normalisation layers use and keep their running statistics. Call it when an epoch starts."""
        for prefix, module in model.named_modules():
            own = [f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)]
            if isinstance(module, _NormBase) and own and self.names.issuperset(own):
                module.train(not self.holds_at(step))

    @torch.no_grad()
    def drop_gradients(self, model: nn.Module) -> None:
        """Call after the backward pass of a frozen step, before the norm of the gradients."""
        for name, parameter in model.named_parameters():
            if name in self.names and parameter.grad is not None:
                local_part(parameter.grad).zero_()  # it may be a part of a bucket, which counts in the norm
                parameter.grad = None
