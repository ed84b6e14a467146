"""Random boxes in pictures: for random resized crops and for random erasing. Pure functions of random bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data.draws import draw_sequence, unit

Box = tuple[int, int, int, int]  # top, left, height and width in whole pixels
_TRIES = 10
_ERASED_SHARE = (0.02, 1 / 3)  # of the area
_ERASED_RATIO = 10 / 3  # of the sides, at most


def random_boxes(bits: Tensor, height: int, width: int, least_share: float, largest_ratio: float) -> Tensor:
    """A box per sample, [B, 4]: top, left, height and width in whole pixels.

    Area and ratio of the sides are drawn until the box fits into the picture, at most ten times. If none fits, the
    box is the largest one in the middle whose ratio is allowed.
    """
    share, ratio, place = _draw_shapes(bits, least_share, largest_ratio)
    area = share * (height * width)
    heights, widths = torch.round((area / ratio).sqrt()), torch.round((area * ratio).sqrt())
    fits = (heights >= 1) & (widths >= 1) & (heights <= height) & (widths <= width)
    first = fits.int().argmax(1, keepdim=True)
    has_one = fits.any(1)
    middle = _largest_box(height, width, largest_ratio)
    box_height = torch.where(has_one, heights.gather(1, first)[:, 0], torch.full_like(place[:, 0], middle[0]))
    box_width = torch.where(has_one, widths.gather(1, first)[:, 0], torch.full_like(place[:, 1], middle[1]))
    room_y, room_x = height - box_height, width - box_width
    top = torch.where(has_one, torch.floor(place[:, 0] * (room_y + 1)), torch.floor(room_y / 2))
    left = torch.where(has_one, torch.floor(place[:, 1] * (room_x + 1)), torch.floor(room_x / 2))
    return torch.stack([top, left, box_height, box_width], 1).long()


def _draw_shapes(bits: Tensor, least_share: float, largest_ratio: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each sample the share of the area and the ratio of the sides of all tries, and the place of the box."""
    draws = _uniform(bits, 2 * _TRIES + 2)
    share = least_share + (1 - least_share) * draws[:, :_TRIES]
    ratio = torch.exp((2 * draws[:, _TRIES : 2 * _TRIES] - 1) * math.log(largest_ratio))
    return share, ratio, draws[:, -2:]


@dataclass(frozen=True)
class BoxDraw:
    """The random numbers of one sample's crop. The box follows when the size of its picture is known."""

    shares: list[float]
    ratios: list[float]
    place: list[float]
    largest_ratio: float
    is_flipped: bool

    def box_in(self, height: int, width: int) -> Box:
        """The same box as `random_boxes` gives for a picture of this size."""
        for share, ratio in zip(self.shares, self.ratios, strict=True):
            area = share * (height * width)
            rows, columns = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 1 <= rows <= height and 1 <= columns <= width:
                top, left = self.place[0] * (height - rows + 1), self.place[1] * (width - columns + 1)
                return math.floor(top), math.floor(left), rows, columns
        rows, columns = _largest_box(height, width, self.largest_ratio)
        return (height - rows) // 2, (width - columns) // 2, rows, columns


@dataclass(frozen=True)
class Crops:
    """Random resized crops of a batch of pictures whose sizes are not known yet. Tensors are in CPU memory."""

    bits: Tensor  # random ones, 64 per sample
    flips: Tensor  # which crops are mirrored, left to right
    side: int  # of the results
    least_share: float
    largest_ratio: float
    interpolation: str

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        return 3, self.side, self.side

    def draws(self) -> Iterator[BoxDraw]:
        """One per sample."""
        columns = (*_draw_shapes(self.bits, self.least_share, self.largest_ratio), self.flips)
        for shares, ratios, place, is_flipped in zip(*(column.tolist() for column in columns), strict=True):
            yield BoxDraw(shares, ratios, place, self.largest_ratio, is_flipped)


def erase_boxes(bits: Tensor, height: int, width: int, probability: float) -> Tensor:
    """Which pixels to erase, [B, H, W]: a rectangle in a random place of some of the samples."""
    is_chosen, area, ratio, row, column = _uniform(bits, 5).unbind(1)
    low, high = _ERASED_SHARE
    size = (low + (high - low) * area) * (height * width)
    ratio = torch.exp((2 * ratio - 1) * math.log(_ERASED_RATIO))
    inside = []
    for side, wanted, place in ((height, (size * ratio).sqrt(), row), (width, (size / ratio).sqrt(), column)):
        length = torch.round(wanted).clamp(1, side)
        start = torch.floor(place * (side - length + 1))
        axis = torch.arange(side, device=bits.device).double()
        inside.append((axis >= start[:, None]) & (axis < (start + length)[:, None]))
    chosen = (is_chosen < probability)[:, None, None]
    return chosen & inside[0][:, :, None] & inside[1][:, None, :]


def _largest_box(height: int, width: int, largest_ratio: float) -> tuple[int, int]:
    if width / height > largest_ratio:
        return height, round(height * largest_ratio)
    if height / width > largest_ratio:
        return round(width * largest_ratio), width
    return height, width


def _uniform(bits: Tensor, count: int) -> Tensor:
    """So many numbers in [0, 1) per sample: [B, count]."""
    return unit(draw_sequence(bits[:, None], torch.arange(count, device=bits.device)[None]))
