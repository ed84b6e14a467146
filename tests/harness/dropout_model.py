"""External models with dropout: torch's, which is random per rank, and ours, which is random per sample."""

from __future__ import annotations

from torch import Tensor, nn

from paceline.models.dropout import SampleDropout


def build(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return _build(num_classes, input_shape, nn.Dropout(0.5))


def build_by_sample(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return _build(num_classes, input_shape, SampleDropout(0.5))


def _build(num_classes: int, input_shape: tuple[int, ...], dropout: nn.Module) -> nn.Module:
    pooled = nn.Sequential(nn.AvgPool2d(4), nn.Flatten())
    width = input_shape[0] * (input_shape[1] // 4) * (input_shape[2] // 4)
    return nn.Sequential(pooled, dropout, nn.Linear(width, num_classes))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.dropout(self.linear(x).relu())
        return x + kept


def build_blocks(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """torch's dropout inside of blocks."""
    width = input_shape[0] * (input_shape[1] // 4) * (input_shape[2] // 4)
    stem = nn.Sequential(nn.AvgPool2d(4), nn.Flatten())
    return nn.Sequential(stem, _Block(width), _Block(width), nn.Linear(width, num_classes))
