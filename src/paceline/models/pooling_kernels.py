"""The kernels of pooling.py. They need triton, which comes with the GPU builds of torch; imported only there.

The memory layout is channels-last. A program handles some adjacent (window, channel) pairs in one row of windows of one
image. Only finding the window within the row takes a division.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_AT_ONCE = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _forward(x, values, places, height, width, CHANNELS: tl.constexpr, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, windows = height // 2, width // 2
    row = tl.program_id(0)
    column = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    is_inside = column < windows * CHANNELS
    image = (row // rows).to(tl.int64)
    corner = x + (image * height + 2 * (row % rows)) * width * CHANNELS + column + (column // CHANNELS) * CHANNELS
    largest = tl.load(corner, is_inside)
    place = tl.zeros([AT_ONCE], tl.int8)
    for number in tl.static_range(1, 4):
        pixel = tl.load(corner + ((number // 2) * width + number % 2) * CHANNELS, is_inside)
        is_larger = (pixel > largest) | (pixel != pixel)  # a NaN wins, as in torch
        largest = tl.where(is_larger, pixel, largest)
        place = tl.where(is_larger, number, place)
    result = row.to(tl.int64) * windows * CHANNELS + column
    tl.store(values + result, largest, is_inside)
    tl.store(places + result, place.to(tl.int8), is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(gradient, places, result, height, width, CHANNELS: tl.constexpr, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, windows = height // 2, width // 2
    all_rows = (height + 1) // 2  # includes an odd last row, which is in no window
    row = tl.program_id(0)
    image, number_of_row = (row // all_rows).to(tl.int64), row % all_rows
    column = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    is_in_window = (column < windows * CHANNELS) & (number_of_row < rows)
    source = (image * rows + number_of_row) * windows * CHANNELS + column
    value = tl.load(gradient + source, is_in_window, other=0.0)
    place = tl.load(places + source, is_in_window, other=0)
    pixel = 2 * (column // CHANNELS)
    corner = result + (image * height + 2 * number_of_row) * width * CHANNELS + column + (column // CHANNELS) * CHANNELS
    for number in tl.static_range(4):
        is_inside = (pixel + number % 2 < width) & (2 * number_of_row + number // 2 < height)
        target = corner + ((number // 2) * width + number % 2) * CHANNELS
        tl.store(target, tl.where(place == number, value, 0.0).to(value.dtype), is_inside)


def launch_forward(x: Tensor, values: Tensor, places: Tensor) -> None:
    images, channels, height, width = x.shape
    grid = (images * (height // 2), triton.cdiv((width // 2) * channels, _AT_ONCE))
    _forward[grid](x, values, places, height, width, channels, _AT_ONCE)


def launch_backward(gradient: Tensor, places: Tensor, result: Tensor) -> None:
    images, channels, height, width = result.shape
    grid = (images * ((height + 1) // 2), triton.cdiv(((width + 1) // 2) * channels, _AT_ONCE))
    _backward[grid](gradient, places, result, height, width, channels, _AT_ONCE)
