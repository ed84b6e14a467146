"""Your own model: a function that returns an nn.Module. Paceline passes the parameters that it has."""

from __future__ import annotations

from torch import nn


def build(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A small convolutional network that returns logits."""
    channels = input_shape[0]
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, num_classes),
    )
