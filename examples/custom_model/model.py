"""A model of one's own: a function that takes what it wants to know, and returns an nn.Module."""

from __future__ import annotations

from torch import nn


def build(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """A small convolutional net. Logits come out; Paceline does the rest."""
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
