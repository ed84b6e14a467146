"""The course's convolutional network: three conv layers, two linear ones, nothing hidden.

16, 32 and 64 filters of 3x3, each followed by a 2x2 max-pool and ReLU, then 512 features and the
classifier. It has no BatchNorm on purpose: every sample's output depends on that sample alone, which
makes it the model of choice for comparing world sizes.
"""

from __future__ import annotations

from torch import Tensor, nn

from paceline.errors import UserError
from paceline.models.dropout import SampleDropout
from paceline.models.pooling import MaxPool2x2

WIDTHS = (16, 32, 64)
SMALLEST_SIDE = 2 ** len(WIDTHS)  # every max-pool halves the image, and one pixel must be left


class CNN(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < SMALLEST_SIDE:
            raise UserError(
                "the images are too small for the cnn",
                got=f"{height}x{width}",
                allowed=f"{SMALLEST_SIDE}x{SMALLEST_SIDE} or larger",
            )
        self.input_shape = input_shape
        layers: list[nn.Module] = []
        for filters in WIDTHS:
            # Pooled first, ReLU has a quarter of the work; the largest of four is cut off at zero either way.
            layers += [nn.Conv2d(channels, filters, 3, padding=1), MaxPool2x2(), nn.ReLU()]
            channels, height, width = filters, height // 2, width // 2
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Sequential(
            nn.Flatten(), nn.Linear(channels * height * width, 512), nn.ReLU(), SampleDropout(dropout)
        )
        self.classifier = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        # Without this, a wrong shape surfaces as a matrix product deep inside that names neither.
        if tuple(x.shape[1:]) != self.input_shape:
            raise ValueError(f"the cnn expects samples of shape {self.input_shape}, got {tuple(x.shape[1:])}")
        logits: Tensor = self.classifier(self.hidden(self.features(x)))
        return logits
