"""A small network for small pictures that learns in seconds.

The first layer is not trained: its 2x2 filters whiten patches of the training pictures (uncorrelated outputs of equal
variance), with each filter and its negative. Three groups follow. Each has two 3x3 convolutions with BatchNorm and
GELU, with max-pooling after the first. Then come the maximum of every channel and a linear layer.
`sprint-wide` has more channels and a third convolution in each group, with a shortcut around the last two.

It trains fast because BatchNorm has no scales and a high momentum, filters start as the identity where possible, and
the last layer starts near zero. Ideas: Page's DAWNBench notes (2018) and Jordan's airbench (2024).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import UserError
from paceline.models.pooling import max_pool_2x2

WIDTHS = {"sprint": (64, 256, 256), "sprint-wide": (128, 512, 512)}
DEEPER = ("sprint-wide",)  # a third convolution in each group
SMALLEST_SIDE = 17  # one pixel must remain after the first layer and three poolings
_PATCH = 2
_LEAST_VARIANCE = 5e-4  # added to variances: directions with less are noise and must not be amplified
_FORGETTING = 0.4  # momentum of BatchNorm: a run has only a few hundred steps


class Sprint(nn.Module):
    def __init__(self, name: str, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < SMALLEST_SIDE:
            raise UserError(
                f"the images are too small for {name}",
                got=f"{height}x{width}",
                allowed=f"{SMALLEST_SIDE}x{SMALLEST_SIDE} or larger",
                hint="use the cnn for smaller images",
            )
        directions = channels * _PATCH**2
        self.whiten = nn.Conv2d(channels, 2 * directions, _PATCH, bias=False)
        self.whiten.weight.requires_grad_(False)
        sizes = (2 * directions, *WIDTHS[name])
        self.groups = nn.Sequential(*(Group(a, b, name in DEEPER) for a, b in itertools.pairwise(sizes)))
        self.classifier = nn.Linear(sizes[-1], num_classes, bias=False)
        nn.init.normal_(self.classifier.weight, std=1 / sizes[-1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.groups(F.gelu(self.whiten(x)))
        # Not amax: compiled in bf16, its backward pass finds no element equal to the maximum and divides by zero.
        logits: Tensor = self.classifier(F.max_pool2d(x, x.shape[2:]).flatten(1))
        return logits

    @torch.no_grad()
    def look_at(self, inputs: Tensor) -> None:
        """Set the first layer from some training inputs. Called once, before the first step of a new run."""
        patches = F.unfold(inputs.float(), _PATCH).transpose(1, 2).flatten(0, 1).double()
        variance, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (directions / (variance + _LEAST_VARIANCE).sqrt()).T
        filters = filters.view(-1, *self.whiten.weight.shape[1:])
        self.whiten.weight.copy_(torch.cat([filters, -filters]))


class Group(nn.Module):
    def __init__(self, inputs: int, outputs: int, is_deeper: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, outputs), _norm(outputs)
        self.conv2, self.norm2 = _conv(outputs, outputs), _norm(outputs)
        self.is_deeper = is_deeper
        if is_deeper:
            self.conv3, self.norm3 = _conv(outputs, outputs), _norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(max_pool_2x2(self.conv1(x))))
        further = F.gelu(self.norm2(self.conv2(x)))
        return F.gelu(x + self.norm3(self.conv3(further))) if self.is_deeper else further


def _conv(inputs: int, outputs: int) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:inputs])
    return conv


def _norm(width: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(width, momentum=_FORGETTING)
    norm.weight.requires_grad_(False)
    return norm
