"""A model with every kind of state: masks as in Swin, buffers of all types, some that differ between ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LOWEST = torch.finfo(torch.float32).min
TYPES = (
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)


def every_bit(dtype: torch.dtype) -> Tensor:
    """Values of a type from arbitrary bytes, including NaNs with payloads."""
    if dtype == torch.bool:
        return torch.tensor([True, False, True])
    raw = torch.arange(0, 3 * dtype.itemsize, dtype=torch.uint8) * 37 + 200
    raw[-1] = 0xFF
    return raw.view(dtype)


class MaskedModel(nn.Module):
    mask: Tensor
    transient_mask: Tensor
    seen: Tensor

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, stride=4)
        self.norm = nn.BatchNorm2d(4)
        self.instance = nn.InstanceNorm2d(4, track_running_stats=True)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(16, num_classes)
        self.tied = self.head
        mask = torch.tensor([0.0, LOWEST, float("-inf"), 0.0])
        self.register_buffer("mask", mask.clone())
        self.register_buffer("transient_mask", mask.clone(), persistent=False)
        self.register_buffer("same_mask", self.mask)
        for dtype in TYPES:
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"all_{name}", every_bit(dtype))
            self.register_buffer(f"scalar_{name}", every_bit(dtype)[0].clone())
            self.register_buffer(f"empty_{name}", every_bit(dtype)[:0].clone())
        self.register_buffer("strided", torch.arange(12.0).view(3, 4).t())
        self.register_buffer(
            "seen", torch.zeros((), dtype=torch.float64)
        )  # differs between ranks, because their samples differ
        self.calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        values = (1.5, float("nan"), b"\x00\xff", None, {3: "three"})
        return {"calls": self.calls, "values": values, "tensor": self.mask.half()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.seen += inputs.double().mean()
        features = self.instance(self.norm(self.conv(inputs)))
        pooled = self.pool(features).flatten(2) + self.mask.clamp(-1, 0) + self.transient_mask.clamp(-1, 0)
        logits: Tensor = self.head(pooled.flatten(1))
        return logits


def build(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return MaskedModel(input_shape[0], num_classes)
