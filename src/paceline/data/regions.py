"""Decodes a part of a picture and resizes it to a square: only at the scale that the part needs.

libjpeg computes a JPEG picture at 1/2, 1/4 or 1/8 of its size in a fraction of the time. The smallest scale is taken
at which the part still has the pixels of the square. Two libraries decode JPEG: Pillow, and libjpeg-turbo through
simplejpeg, which is faster. Everything that is not plain JPEG is decoded by Pillow, so all rules of `pictures.py` hold
for both. simplejpeg reports recoverable damage as an error; Pillow then decides whether the picture can be read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional as F

from paceline.data.crops import Box
from paceline.data.jpeg_libraries import PILLOW, TURBO
from paceline.data.pictures import as_rgb, decode_pixels, opened, orientation_of

_SCALES = (8, 4, 2)  # libjpeg-turbo has vector code for these; others take as long as the full size
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_PLAIN = ("RGB", "L")  # modes of Pillow that simplejpeg decodes to the same pixels

Pixels = NDArray[np.uint8]


def decode_region(
    content: bytes | memoryview,
    choose: Callable[[int, int], Box],
    side: int,
    *,
    decoder: str,
    interpolation: str = "bilinear",
    is_flipped: bool = False,
) -> Pixels:
    """The box that `choose(height, width)` gives for the upright picture, resized to [3, side, side]."""
    region = decode_box(content, choose, side, decoder)
    return resize_region(region, side, interpolation, is_flipped=is_flipped)


def decode_box(content: bytes | memoryview, choose: Callable[[int, int], Box], side: int, decoder: str) -> Pixels:
    """The box as [height, width, 3], at the smallest scale that gives it `side` pixels."""
    with opened(content) as image:
        if image.format not in ("JPEG", "MPO"):
            rgb = as_rgb(image)
            return _cut(rgb, choose(rgb.height, rgb.width))
        turn = orientation_of(image)
        width, height = image.size if turn not in _SIDEWAYS else image.size[::-1]
        box = choose(height, width)
        scale = next((scale for scale in _SCALES if min(box[2:]) >= scale * side), 1)
        pixels = None
        if decoder == TURBO and image.mode in _PLAIN:
            pixels = _decode_turbo(content, image.size, scale, turn)
        if pixels is None:
            image.draft("RGB", (image.width // scale, image.height // scale))
            return _cut(as_rgb(image), _shrink(box, scale))
        top, left, rows, columns = _shrink(box, scale)
        return pixels[top : top + rows, left : left + columns]


def decode_square(content: bytes | memoryview, side: int, *, decoder: str) -> Pixels:
    """The central square of a picture, resized to [3, side, side]."""
    if decoder == PILLOW:
        return decode_pixels(content, side)
    return decode_region(content, central_square, side, decoder=decoder)


def central_square(height: int, width: int) -> Box:
    short = min(height, width)
    return (height - short) // 2, (width - short) // 2, short, short


def _shrink(box: Box, scale: int) -> Box:
    """A box of a picture that is decoded at 1/scale. It stays inside: a scaled side is rounded up."""
    top, left, rows, columns = (value // scale for value in box)
    return top, left, rows, columns


def _cut(image: Image.Image, box: Box) -> Pixels:
    top, left, rows, columns = box
    return np.array(image.crop((left, top, left + columns, top + rows)))


def _decode_turbo(content: bytes | memoryview, size: tuple[int, int], scale: int, turn: int) -> Pixels | None:
    """The upright picture at 1/scale as [height, width, 3]; None if there is damage."""
    import simplejpeg

    # The scale is the smallest one that gives these sides: exactly 1/scale.
    width, height = (-(-value // scale) for value in size)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(content, "RGB", min_height=height, min_width=width)
    except (ValueError, MemoryError):
        return None
    return turn_upright(pixels, turn)


def turn_upright(pixels: Pixels, turn: int) -> Pixels:
    """Apply an EXIF orientation to [height, width, 3]. A view."""
    if turn in _SIDEWAYS:
        pixels = pixels.transpose(1, 0, 2)
    if turn in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if turn in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def resize_region(region: Pixels, side: int, interpolation: str = "bilinear", *, is_flipped: bool = False) -> Pixels:
    """[height, width, 3] to [3, side, side], with antialiasing, as a view of [side, side, 3]."""
    # numpy makes the copy: torch would start its own threads for it in each thread of the pool. torch resizes and flips
    # bytes with vector code: a resize takes a third of Pillow's time.
    pixels = torch.from_numpy(np.ascontiguousarray(region)).permute(2, 0, 1)[None]
    if region.shape[:2] != (side, side):
        pixels = F.interpolate(pixels, (side, side), mode=interpolation, align_corners=False, antialias=True)
    result: Pixels = (pixels.flip(3) if is_flipped else pixels)[0].numpy()
    return result
