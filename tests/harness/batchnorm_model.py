"""A small convolutional model with BatchNorm, loaded like a user's own model."""

from __future__ import annotations

from torch import nn


def build(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )
