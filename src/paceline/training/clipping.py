"""Clipping of gradients by value, and adaptive clipping by unit. Clipping by the global norm is a part of the step.

Nothing here reads values on the host, so a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.models.layers import head_parameters
from paceline.parallel.apply import ParallelModel
from paceline.parallel.parts import is_sharded, local_part, sum_over_shards
from paceline.settings.schema import OptimConfig

_SMALLEST_NORM = 1e-3  # of a unit: one that starts at zero must be able to grow


def build_clipping(config: OptimConfig, model: ParallelModel) -> Callable[[], None] | None:
    """What clips the gradients in place before an update; None if nothing does."""
    if config.clip_value:
        return lambda: clip_by_value(model.local_gradients(), config.clip_value)
    if config.clip_agc:
        head = head_parameters(model.module)
        body = [value for name, value in model.module.named_parameters() if name not in head and value.requires_grad]
        return lambda: clip_units(body, config.clip_agc)
    return None


def clip_by_value(gradients: list[Tensor], limit: float) -> None:
    torch._foreach_clamp_min_(gradients, -limit)
    torch._foreach_clamp_max_(gradients, limit)


@torch.no_grad()
def clip_units(parameters: list[nn.Parameter], share: float) -> None:
    """Adaptive gradient clipping (Brock et al., 2021): no unit's gradient is longer than `share` of its weights.

    A unit is a row of a weight (an output feature or filter), or a whole vector. Collective if they are sharded.
    """
    used = [parameter for parameter in parameters if parameter.grad is not None]
    rows = [parameter for parameter in used if parameter.ndim > 1]
    vectors = [parameter for parameter in used if parameter.ndim <= 1]
    for parameter in rows:  # sharded tensors are cut between rows
        weight, gradient = local_part(parameter.detach()), _gradient(parameter)
        dimensions = tuple(range(1, weight.ndim))
        sizes = [torch.linalg.vector_norm(part, dim=dimensions, keepdim=True) for part in (weight, gradient)]
        gradient.mul_(_factors(sizes[0], sizes[1], share))
    if vectors:
        weights, gradients = [local_part(one.detach()) for one in vectors], [_gradient(one) for one in vectors]
        norms = torch.stack([torch.linalg.vector_norm(part) for part in (*weights, *gradients)])
        if is_sharded(vectors[0]):
            squares = norms.square()
            sum_over_shards(squares, vectors[0])
            norms = squares.sqrt()
        factors = _factors(norms[: len(vectors)], norms[len(vectors) :], share)
        torch._foreach_mul_(gradients, list(factors.unbind()))


def _factors(weight_norms: Tensor, gradient_norms: Tensor, share: float) -> Tensor:
    limits = weight_norms.clamp_min(_SMALLEST_NORM) * share
    return (limits / gradient_norms.clamp_min(1e-6)).clamp_max(1.0)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local_part(parameter.grad)
