"""Parameters and memory of a run before it runs, counted on torch's meta device (shapes, no data)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.models.registry import build_model
from paceline.training.plan import RunPlan

_OPTIMIZER_COPIES = {"sgd": 1, "nesterov": 1, "adam": 2, "adamw": 2, "muon": 1}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per rank. Activations are the outputs of all layers of one microbatch: an upper guide."""

    num_parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate_memory(plan: RunPlan, strategy: str, *, is_mixed: bool) -> MemoryEstimate:
    config = plan.config
    with torch.device("meta"):
        model = build_model(config.model, plan.input_shape, plan.info.num_classes, load_weights=False)
        elements = _count_activations(model, torch.empty(plan.microbatch_size, *plan.input_shape))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    shards = plan.world_size if strategy == "fsdp" else 1
    copies = (
        _OPTIMIZER_COPIES[config.optim.optimizer] if config.optim.momentum or "adam" in config.optim.optimizer else 0
    )
    weights = 4 * num_parameters // shards
    averages = weights if config.optim.ema_decay else 0
    return MemoryEstimate(
        num_parameters=num_parameters,
        weights=weights + averages,
        gradients=weights,
        optimizer=weights * copies,
        activations=elements * (2 if is_mixed else 4),
    )


def _count_activations(model: nn.Module, inputs: Tensor) -> int:
    """Elements that leave the leaf modules in one forward pass."""
    elements = [inputs.numel()]

    def count(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            elements.append(output.numel())

    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(count)
    model(inputs)
    return sum(elements)
