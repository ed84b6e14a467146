"""ResNet-18, -34 and -50 (He et al., 2015). ResNet-50 has its strides in the 3x3 convolutions.

Parameters have the names and shapes of torchvision's models, so weights can be exchanged in both directions.
Images of up to 64 pixels get the stem of the paper's CIFAR models, a 3x3 convolution of stride 1 without
max-pool: the ImageNet stem would reduce a 32-pixel image to 8 pixels before the first block. Initialisation:
He-normal over the fan-out for convolutions, one and zero for BatchNorm, torch's default for the classifier.
"""

from __future__ import annotations

from torch import Tensor, nn

LARGEST_SMALL_IMAGE = 64
STEM_WIDTH = 64
WIDTHS = (64, 128, 256, 512)
STRIDES = (1, 2, 2, 2)  # of the first block of each stage
DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}  # blocks per stage


def _conv(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, side, stride=stride, padding=side // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The shortcut of a block: the identity if the shapes are equal, otherwise a projection."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.downsample(x)
        out: Tensor = self.relu(y)
        return out


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.downsample(x)
        out: Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    def __init__(self, depth: int, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        small = max(height, width) <= LARGEST_SMALL_IMAGE
        self.conv1 = _conv(channels, STEM_WIDTH, 3) if small else _conv(channels, STEM_WIDTH, 7, 2)
        self.bn1 = nn.BatchNorm2d(STEM_WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)

        block = Bottleneck if depth >= 50 else BasicBlock
        features = STEM_WIDTH
        stages = []
        for filters, repeats, stride in zip(WIDTHS, DEPTHS[depth], STRIDES, strict=True):
            stage = nn.Sequential()
            for i in range(repeats):
                stage.append(block(features, filters, stride if i == 0 else 1))
                features = filters * block.expansion
            stages.append(stage)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages

        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(features, num_classes)
        self.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def _initialise(module: nn.Module) -> None:
    # BatchNorm and the classifier keep torch's initialisation.
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
