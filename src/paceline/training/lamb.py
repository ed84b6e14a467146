"""LAMB (You et al., 2019): Adam whose step in each tensor is as long as a share of the tensor's weights.

The direction is Adam's with decoupled weight decay. Its length is the learning rate times the norm of the weights, so
layers with large gradients do not limit the rate of the others. Large global batches then train with large rates.
Tensors without weight decay (norms, biases) take Adam's own step, as in the paper's code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.parallel.parts import is_sharded, local_part, sum_over_shards

_BETAS = (0.9, 0.999)
_EPS = 1e-6


class Lamb(torch.optim.Optimizer):
    def __init__(self, parameters: list[dict[str, Any]], lr: float) -> None:
        # `fused` says where scalars of the state live: on the parameters' device.
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.0, "lr_factor": 1.0, "fused": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            if used:
                self._step_group(used, group["lr"], group["weight_decay"])

    def _step_group(self, parameters: list[Tensor], lr: float | Tensor, decay: float) -> None:
        weights = [local_part(parameter) for parameter in parameters]
        updates = self._adam_directions(parameters)
        if decay:
            torch._foreach_add_(updates, weights, alpha=decay)
            rates = (_lengths(weights, parameters) / _lengths(updates, parameters)).nan_to_num(1.0, 1.0, 1.0)
            # A tensor of zeros has no size to follow: it takes Adam's step.
            rates = torch.where(rates == 0, 1.0, rates)
            torch._foreach_mul_(updates, list((rates * lr).unbind()))
        else:
            torch._foreach_mul_(updates, lr)
        torch._foreach_sub_(weights, updates)

    def _adam_directions(self, parameters: list[Tensor]) -> list[Tensor]:
        gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        states = [self._state_of(parameter) for parameter in parameters]
        means = [local_part(state["exp_avg"]) for state in states]
        squares = [local_part(state["exp_avg_sq"]) for state in states]
        counts = [state["step"] for state in states]
        first, second = _BETAS
        torch._foreach_add_(counts, 1.0)
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        steps = torch.stack(counts)
        sizes = torch._foreach_sqrt(squares)
        torch._foreach_div_(sizes, list((1 - second**steps).sqrt().unbind()))
        torch._foreach_add_(sizes, _EPS)
        updates = torch._foreach_div(means, sizes)
        torch._foreach_div_(updates, list((1 - first**steps).unbind()))
        return list(updates)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        return state


def _lengths(parts: list[Tensor], parameters: list[Tensor]) -> Tensor:
    """The norm of each whole tensor, of which this rank may hold a part. Collective if they are sharded."""
    norms = torch.stack([torch.linalg.vector_norm(part) for part in parts])
    if not is_sharded(parameters[0]):
        return norms
    squares = norms.square()
    sum_over_shards(squares, parameters[0])
    return squares.sqrt()
