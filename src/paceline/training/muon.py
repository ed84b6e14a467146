"""Muon (Jordan, 2024): hidden weights are updated by the nearest orthogonal matrix to their momentum.

All singular values of such an update are near one, so its size depends on the learning rate and not on the gradients.
The length of a filter in front of a BatchNorm (a convolution without a bias) has no effect on its output. These filters
are scaled to a fixed norm before each update. Adam updates the last layer, biases and scales, with rates relative to
Muon's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Newton-Schulz iteration of the fifth order. With these coefficients singular values come near one in a few iterations.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 3
_TINY = 1e-7
_BETAS = (0.8, 0.95)
_BIAS_RATE, _HEAD_RATE = 0.125, 0.01  # factors of Muon's rate
_SMALL = 2**28  # multiplications in a matrix times itself: with fewer, a GPU spends most of the time on the launch


class Muon(torch.optim.Optimizer):
    """Parameters in three groups: hidden weights, vectors (biases and scales), and the last layer."""

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
        self._even: dict[int, tuple[tuple[int, ...], bool]] = {}  # see _are_even

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"] * group["rate"]
            with_gradients = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not with_gradients:
                continue
            if group["held"] is None:
                self._step_by_adam(with_gradients, rate)
            else:
                self._turn(with_gradients, group, rate)

    def _turn(self, weights: list[Tensor], group: dict[str, Any], rate: float | Tensor) -> None:
        """Few calls, each for many tensors: on a GPU a launch costs more than the arithmetic."""
        gradients, momentum = _gradients_of(weights), group["momentum"]
        speeds = [self._remember(weight, "momentum", weight) for weight in weights]
        torch._foreach_mul_(speeds, momentum)
        torch._foreach_add_(speeds, gradients)
        ahead = torch._foreach_add(gradients, speeds, alpha=momentum)
        self._hold(weights, group)
        if group["weight_decay"]:
            for weight in _of_group(weights, group, is_held=False):
                weight.mul_(1 - rate * group["weight_decay"])
        step = torch.as_tensor(rate, dtype=weights[0].dtype, device=weights[0].device)
        for numbers in _together(weights):
            updates = orthogonal([ahead[number].flatten(1) for number in numbers])
            for number, update in zip(numbers, updates, strict=True):
                weights[number].addcmul_(update.reshape(weights[number].shape), step, value=-1)

    def _hold(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Scale filters in front of a BatchNorm to a fixed norm, which is about that of their initial values."""
        held = _of_group(weights, group, is_held=True)
        if not held:
            return
        factors = torch._foreach_norm(held)
        torch._foreach_add_(factors, _TINY)
        torch._foreach_reciprocal_(factors)
        torch._foreach_mul_(factors, [len(weight) ** 0.5 for weight in held])
        for weight, factor in zip(held, factors, strict=True):
            weight.mul_(factor)

    def _step_by_adam(self, parameters: list[Tensor], rate: Tensor) -> None:
        (first, second), gradients = _BETAS, _gradients_of(parameters)
        means = [self._remember(parameter, "mean", parameter) for parameter in parameters]
        squares = [self._remember(parameter, "square", parameter) for parameter in parameters]
        counts = [self._remember(parameter, "count", parameter.new_zeros(())) for parameter in parameters]
        torch._foreach_add_(counts, 1.0)
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        sizes = torch._foreach_sqrt(squares)
        torch._foreach_add_(sizes, 1e-10)
        steps = torch._foreach_div(means, sizes)
        # The averages start at zero, so they are too small in the first steps (bias correction). If all parameters have
        # had the same number of steps, one factor corrects all of them.
        if self._are_even(parameters, counts):
            torch._foreach_mul_(steps, rate * (1 - second ** counts[0]).sqrt() / (1 - first ** counts[0]))
        else:
            for step, count in zip(steps, counts, strict=True):
                step.mul_(rate * (1 - second**count).sqrt() / (1 - first**count))
        torch._foreach_sub_(parameters, steps)

    def _are_even(self, parameters: list[Tensor], counts: list[Tensor]) -> bool:
        """Whether all parameters have had the same number of steps. A layer that some steps do not use has had fewer.

        Counts are read only if other parameters or counts are given than last time: reading makes the host wait.
        """
        given = (id(counts[0]), *map(id, parameters))
        known, is_even = self._even.get(len(parameters[0].shape), ((), False))
        if known != given:
            is_even = len(set(torch.stack(counts).tolist())) == 1
            self._even[len(parameters[0].shape)] = given, is_even
        return is_even

    def _remember(self, parameter: Tensor, name: str, like: Tensor) -> Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(like, requires_grad=False)
        value: Tensor = state[name]
        return value


def _gradients_of(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _of_group(weights: list[Tensor], group: dict[str, Any], *, is_held: bool) -> list[Tensor]:
    wanted = {id(weight) for weight, held in zip(group["params"], group["held"], strict=True) if held is is_held}
    return [weight for weight in weights if id(weight) in wanted]


def _together(weights: list[Tensor]) -> list[list[int]]:
    """Positions of the weights whose updates are computed in one batch: of one shape, or on a GPU all small ones."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, weight in enumerate(weights):
        short, long = sorted((len(weight), weight.numel() // len(weight)))
        is_small = weight.is_cuda and short * short * long <= _SMALL
        groups.setdefault(() if is_small else tuple(weight.shape), []).append(number)
    return list(groups.values())


def orthogonal(matrices: list[Tensor]) -> list[Tensor]:
    """The nearest orthogonal matrices, approximately: singular values become about one."""
    wide = [matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix for matrix in matrices]
    x = _stack(wide)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + _TINY)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return [_unpad(padded, matrix) for padded, matrix in zip(x.to(wide[0].dtype), matrices, strict=True)]


def _unpad(padded: Tensor, matrix: Tensor) -> Tensor:
    """The part of the result that belongs to this matrix, in its shape."""
    rows, columns = sorted(matrix.shape)
    part = padded[:rows, :columns]
    return part.mT if matrix.shape[0] > matrix.shape[1] else part


def _stack(matrices: list[Tensor]) -> Tensor:
    """One tensor [N, rows, columns]. Smaller matrices are padded with zeros, which stay zeros."""
    dtype = torch.bfloat16 if matrices[0].is_cuda else matrices[0].dtype  # precise enough, and fast on GPUs
    if len({matrix.shape for matrix in matrices}) == 1:
        return torch.stack(matrices).to(dtype)
    rows, columns = (max(matrix.shape[axis] for matrix in matrices) for axis in (0, 1))
    stacked = matrices[0].new_zeros(len(matrices), rows, columns, dtype=dtype)
    for padded, matrix in zip(stacked, matrices, strict=True):
        padded[: len(matrix), : matrix.shape[1]] = matrix
    return stacked
