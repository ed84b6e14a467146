"""A small multi-layer perceptron that trains in seconds on any machine.

Three linear layers, input - hidden - hidden/2 - classes, with ReLU and dropout between them. Samples are flattened
first, so both vectors and images work.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from paceline.models.dropout import SampleDropout


class MLP(nn.Module):
    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, *, hidden_size: int = 256, dropout: float = 0.0
    ) -> None:
        super().__init__()
        narrow = max(1, hidden_size // 2)
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(input_shape), hidden_size),
            nn.ReLU(),
            SampleDropout(dropout),
            nn.Linear(hidden_size, narrow),
            nn.ReLU(),
            SampleDropout(dropout),
        )
        self.classifier = nn.Linear(narrow, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.body(x))
        return logits
