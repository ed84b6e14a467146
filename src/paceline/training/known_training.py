"""Thirty steps of training with a result that is known bit for bit, on every machine.

Ordinary kernels order their sums differently on different processors, so the last bits differ. Here every sum is a
fixed tree of additions, every product is a separate operation, and otherwise there are only comparisons and divisions
by two. IEEE arithmetic defines the result of each. One hash therefore holds for any torch, CPU, GPU and number of
ranks. A rank with another hash has computed or received a wrong number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.data.draws import draw_below
from paceline.parallel.collectives import sum_over_ranks, tree_sum
from paceline.runtime.detect import World

STEPS = 30
KNOWN_HASH = "c1856cafbbe694a199663e77a5a0db80054dd009144c8813d66c1a23e64f3b6e"
_SAMPLES, _INPUTS, _HIDDEN, _CLASSES = 64, 16, 16, 4
_SIZES = (_HIDDEN * _INPUTS, _HIDDEN, _CLASSES * _HIDDEN, _CLASSES)
_MOMENTUM, _LR = 0.875, 0.0625
_DAMAGED_STEP = 10


def train_alone(device: str, flips_a_bit: Callable[[], bool] = lambda: False) -> str:
    """Train on this rank alone. Returns the hash of the weights. `flips_a_bit`: an injected fault."""
    return _train(device, flips_a_bit, World(0, 1, 0, 1, "alone", "", device, "", 1))


def train_together(world: World, flips_a_bit: Callable[[], bool] = lambda: False) -> str:
    """Train with all ranks: each takes a share of every batch, and gradients are exchanged. Collective."""
    return _train(world.device, flips_a_bit, world)


def _train(device: str, flips_a_bit: Callable[[], bool], world: World) -> str:
    inputs, targets = _make_data(device)
    weights = _make_weights(device)
    speed = torch.zeros_like(weights)
    mine = slice(world.rank, _SAMPLES, world.world_size)  # with more ranks than samples, some have none
    for step in range(STEPS):
        rows = torch.zeros(_SAMPLES, len(weights), device=device)
        rows[mine] = _gradients(weights, inputs[mine], targets[mine])
        if step == _DAMAGED_STEP and flips_a_bit():
            _flip_a_bit(rows[world.rank % _SAMPLES])
        # Each element is one rank's number plus zeros: exact in any order, except the sign of a zero (no effect).
        sum_over_ranks(rows, world)
        speed = speed * _MOMENTUM + tree_sum(rows) / _SAMPLES
        weights = weights - speed * _LR
    return hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()


def _make_data(device: str) -> tuple[Tensor, Tensor]:
    """Inputs are eighths between -1 and 1. The class of a sample is the group of inputs with the largest sum."""
    keys = torch.arange(_SAMPLES * _INPUTS)
    numbers = draw_below(17, keys, 1).view(_SAMPLES, _INPUTS) - 8
    votes = numbers.view(_SAMPLES, _CLASSES, -1).sum(2)  # whole numbers
    targets = torch.zeros(_SAMPLES, _CLASSES)
    targets[torch.arange(_SAMPLES), votes.argmax(1)] = 1.0
    return (numbers.float() / 8).to(device), targets.to(device)


def _make_weights(device: str) -> Tensor:
    keys = torch.arange(sum(_SIZES))
    return ((draw_below(257, keys, 2).float() - 128) / 512).to(device)


def _gradients(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of half the squared error, one row per sample."""
    parts = weights.split(_SIZES)
    first, second = parts[0].view(_HIDDEN, _INPUTS), parts[2].view(_CLASSES, _HIDDEN)
    before = _product(inputs, first) + parts[1]
    hidden = before.clamp(min=0.0)
    error = _product(hidden, second) + parts[3] - targets
    back = _product(error, second.t()) * (before > 0)
    outer = [back[:, :, None] * inputs[:, None, :], back, error[:, :, None] * hidden[:, None, :], error]
    return torch.cat([part.reshape(len(inputs), -1) for part in outer], dim=1)


def _product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows @ matrix.T, summed in a fixed tree."""
    return tree_sum((rows[:, None, :] * matrix[None]).permute(2, 0, 1))


def _flip_a_bit(row: Tensor) -> None:
    """Change the last number by half of its value. It is an output's error and never zero."""
    row.view(torch.int32)[-1] ^= 1 << 22
