"""Muon (Jordan, 2024): hidden weights are updated by the nearest orthogonal matrix to their momentum.

Every direction of such an update has the same length, so a rate says how far the weights turn, whatever the size of the
gradients. Filters in front of a BatchNorm - convolutions without a bias - have no length that matters and are held at
one. First and last layers, biases and scales are left to Adam, at rates of their own relative to Muon's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Newton-Schulz iteration of the fifth order. These coefficients bring singular values near one fast, not exactly.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 3
_TINY = 1e-7
_BETAS = (0.8, 0.95)
_BIAS_RATE, _HEAD_RATE = 0.125, 0.01  # of Muon's own


class Muon(torch.optim.Optimizer):
    """Parameters in three groups: hidden weights, the rest's vectors, and the last layer."""

    def __init__(self, model: nn.Module, lr: float, momentum: float, weight_decay: float) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        weights = [parameter for parameter in trained if parameter.dim() > 1]
        held = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv2d) and m.bias is None}
        groups: list[dict[str, Any]] = [
            {"params": weights[:-1], "rate": 1.0, "held": [id(weight) in held for weight in weights[:-1]]},
            {"params": [parameter for parameter in trained if parameter.dim() <= 1], "rate": _BIAS_RATE},
            {"params": weights[-1:], "rate": _HEAD_RATE},
        ]
        # `fused` says where scalars of the state live: on the parameters' device.
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "held": None, "fused": True}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"] * group["rate"]
            if group["held"] is None:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_by_adam(parameter, rate)
                continue
            for parameter, is_held in zip(group["params"], group["held"], strict=True):
                if parameter.grad is not None:
                    self._turn(parameter, rate, group["momentum"], group["weight_decay"], is_held=is_held)

    def _turn(self, weight: Tensor, rate: Tensor, momentum: float, decay: float, *, is_held: bool) -> None:
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].mul_(momentum).add_(weight.grad)
        ahead = weight.grad.add(state["momentum"], alpha=momentum)  # type: ignore[union-attr]
        if is_held:
            weight.mul_(len(weight) ** 0.5 / (weight.norm() + _TINY))
        else:
            weight.mul_(1 - rate * decay)
        weight.sub_(orthogonal(ahead.flatten(1)).view_as(weight) * rate)

    def _step_by_adam(self, parameter: Tensor, rate: Tensor) -> None:
        state = self.state[parameter]
        if "count" not in state:
            state["count"] = torch.zeros((), device=parameter.device)
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        gradient, (first, second) = parameter.grad, _BETAS
        assert gradient is not None
        state["count"] += 1
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        mean = state["mean"] / (1 - first ** state["count"])
        square = state["square"] / (1 - second ** state["count"])
        parameter.sub_(mean / (square.sqrt() + 1e-10) * rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """Roughly the orthogonal matrix nearest to this one: all its singular values come out near one."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16() if matrix.is_cuda else matrix  # its digits suffice, and GPUs multiply them faster
    x = x.T if is_tall else x
    x = x / (x.norm() + _TINY)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.T if is_tall else x).to(matrix.dtype)
    return result
