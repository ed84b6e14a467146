"""A model whose layers are not all used in every step, on every rank or for every sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Branching(nn.Module):
    """A small net with a layer for odd steps only, one for some samples only, and one that is never used.

    Steps are counted in a buffer, which every strategy and every lane handles in the same way. Samples whose first
    number is at least `threshold` use the rare layer.
    """

    calls: Tensor

    def __init__(self, num_classes: int, size: int, threshold: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(size, 24), nn.Tanh())
        self.odd = nn.ModuleList([nn.Linear(24, 24)])  # in a list: a separate FSDP group
        self.rare = nn.Linear(24, 24)
        self.never = nn.Linear(24, 24)
        self.head = nn.Linear(24, num_classes)
        self.threshold = threshold
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs.flatten(1))
        if self.training:
            self.calls += 1
        if int(self.calls) % 2:
            hidden = hidden + torch.tanh(self.odd[0](hidden))
        rows = inputs.flatten(1)[:, 0] >= self.threshold
        if bool(rows.any()):
            hidden = torch.where(rows[:, None], torch.tanh(self.rare(hidden)), hidden)
        logits: Tensor = self.head(hidden)
        return logits


def build(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """For complete runs on pictures: only some batches of a rank have a bright first pixel."""
    return Branching(num_classes, int(torch.Size(input_shape).numel()), threshold=1.6)


class CountingOnHost(nn.Module):
    """Uses one of its layers only in every second call, and counts calls in plain Python."""

    def __init__(self, num_classes: int, size: int) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(size, 24), nn.Linear(24, 24)
        self.head = nn.Linear(24, num_classes)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.always(inputs.flatten(1)))
        self.calls += self.training
        if self.calls % 2:
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        logits: Tensor = self.head(hidden)
        return logits


def build_counting(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return CountingOnHost(num_classes, int(torch.Size(input_shape).numel()))
