"""VGG-11, -16 and -19 (Simonyan and Zisserman, 2014), without BatchNorm.

Parameters have the names and shapes of torchvision's models, so weights can be exchanged in both directions.
Dropout is set by the config (0.5 in the paper and in the cifar10-vgg19 recipe).
Initialisation: He-normal over the fan-out for convolutions, N(0, 0.01) for linear layers, zero biases.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UserError
from paceline.models.dropout import SampleDropout
from paceline.models.pooling import MaxPool2x2

WIDTHS = (64, 128, 256, 512, 512)  # of the five stages; each ends in a 2x2 max-pool
DEPTHS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}  # convolutions per stage
GRID = 7  # the classifier reads a 7x7 map for any image size
SMALLEST_SIDE = 2 ** len(WIDTHS)


def pool_to_grid(x: Tensor) -> Tensor:
    """Adaptive average pooling to 7x7. The two common cases do not use the pooling kernel.

    A 224-pixel image arrives as 7x7 already, and a 32-pixel image as a single point. Both cases give the same
    bits as the kernel. Unlike the kernel, they have a deterministic backward pass on GPUs.
    """
    if x.shape[-2:] == (GRID, GRID):
        return x
    if x.shape[-2:] == (1, 1):
        return x.expand(-1, -1, GRID, GRID)
    return F.adaptive_avg_pool2d(x, (GRID, GRID))


class VGG(nn.Module):
    def __init__(self, depth: int, input_shape: tuple[int, ...], num_classes: int, *, dropout: float = 0.5) -> None:
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < SMALLEST_SIDE:
            raise UserError(
                f"the images are too small for vgg{depth}",
                got=f"{height}x{width}",
                allowed=f"{SMALLEST_SIDE}x{SMALLEST_SIDE} or larger",
                hint="use a resnet or the cnn for smaller images",
            )
        layers: list[nn.Module] = []
        for filters, repeats in zip(WIDTHS, DEPTHS[depth], strict=True):
            for _ in range(repeats):
                layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU(inplace=True)]
                channels = filters
            layers.insert(-1, MaxPool2x2())  # before ReLU: the same bits, and a quarter of the work for ReLU
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * GRID * GRID, 4096),
            nn.ReLU(inplace=True),
            SampleDropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            SampleDropout(dropout),
            nn.Linear(4096, num_classes),
        )
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(pool_to_grid(self.features(x)).flatten(1))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
    else:
        return
    assert module.bias is not None
    nn.init.zeros_(module.bias)
