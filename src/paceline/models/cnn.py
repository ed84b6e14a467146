"""The course's convolutional network: three convolutions and two linear layers.

16, 32 and 64 filters of 3x3, each followed by a 2x2 max-pool and ReLU, then 512 features and the
classifier. It has no BatchNorm on purpose: the output for a sample depends only on that sample, so the
model is suited to compare world sizes.
"""

from __future__ import annotations

from torch import Tensor, nn

from paceline.errors import UserError
from paceline.models.dropout import SampleDropout
from paceline.models.pooling import MaxPool2x2

WIDTHS = (16, 32, 64)
SMALLEST_SIDE = 2 ** len(WIDTHS)  # every max-pool halves the image; one pixel must remain


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
            # Pooling before ReLU gives the same result and a quarter of the work for ReLU.
            layers += [nn.Conv2d(channels, filters, 3, padding=1), MaxPool2x2(), nn.ReLU()]
            channels, height, width = filters, height // 2, width // 2
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Sequential(
            nn.Flatten(), nn.Linear(channels * height * width, 512), nn.ReLU(), SampleDropout(dropout)
        )
        self.classifier = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        # Without this check, a wrong shape fails later in a matrix product, whose error names no input shape.
        if tuple(x.shape[1:]) != self.input_shape:
            raise ValueError(f"the cnn expects samples of shape {self.input_shape}, got {tuple(x.shape[1:])}")
        logits: Tensor = self.classifier(self.hidden(self.features(x)))
        return logits
