"""Pictures as pixels: the formats that are read, and one rule for every kind of picture. Imports no torch.

Training, packing, checks and predictions all decode here, so they see the same pixels. docs/guides/data.md has the same
rules as a table.

- EXIF: the orientation is applied. An orientation that cannot be read is ignored.
- Several frames or pages: the first one.
- Grey, palette, CMYK, YCbCr: converted to RGB by Pillow. Colour profiles are not applied.
- Transparent: on a white background.
- 16 bits per value: the high byte, as Pillow does it for colours. If a PNG or TIFF picture has only values below 4096,
  its values have 12 bits: value // 16. A TIFF file that states 12 bits has 12 bits.
- Whole numbers of 32 bits: like 16 bits if all are from 0 to 65535. Others are refused.
- Floats: 0 is black and 1 is white. A picture with other values is refused.
- Damaged, truncated, or more than `MOST_PIXELS`: refused.
"""

from __future__ import annotations

import hashlib
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError, features

from paceline.errors import DataError

# The number of these rules. A fingerprint and a packed data set hold it, so a run does not resume with other pixels.
# 1: EXIF was ignored, transparency was cut off, floats were clipped, 12 bits were read as 16.
DECODER = 2
GREY = 128  # replaces a picture that cannot be read
MOST_PIXELS = 178_956_970  # where Pillow refuses by default; the user's code may have changed that

_FORMATS = {  # of Pillow, with their file names. Without a list Pillow also opens EPS, which starts another program.
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "BMP": (".bmp",),
    "DIB": (".dib",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm", ".pfm"),
    "WEBP": (".webp",),
    "AVIF": (".avif",),
    "JPEG2000": (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    "TGA": (".tga",),  # last: it has no mark at its beginning
}
_OPTIONAL = {"WEBP": "webp", "AVIF": "avif", "JPEG2000": "jpg_2000"}  # parts of Pillow that may be absent
ABSENT = frozenset(
    name
    for name, feature in _OPTIONAL.items()
    if feature not in (*features.modules, *features.codecs) or not features.check(feature)
)
READ_FORMATS = tuple(name for name in _FORMATS if name not in ABSENT)
EXTENSIONS = frozenset(extension for name in READ_FORMATS for extension in _FORMATS[name])
ABSENT_EXTENSIONS = frozenset(extension for name in ABSENT for extension in _FORMATS[name])

# Pillow raises these for damaged pictures. MemoryError: the file states a wrong length. Warnings are errors under
# `python -W error`.
_UNREADABLE = (
    *(OSError, SyntaxError, ValueError, EOFError, struct.error, MemoryError),
    *(Image.DecompressionBombError, Warning),
    *(IndexError, KeyError, TypeError, AttributeError, OverflowError, ZeroDivisionError, RecursionError),
)
_ORIENTATION = 0x0112  # tag of EXIF
_TURNS: dict[object, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BITS_PER_SAMPLE = 258  # tag of TIFF
_STATES_RANGE = ("PPM", "JPEG2000")  # Pillow has scaled their values by the range that the file states
_WHITE = (255, 255, 255, 255)


def read_pixels(path: Path, side: int) -> NDArray[np.uint8]:
    """A picture as [3, side, side]: its central square, scaled. The array is a view of [side, side, 3]."""
    with opened(path) as image:
        return square_pixels(image, side)


def decode_pixels(content: bytes | memoryview, side: int) -> NDArray[np.uint8]:
    """Like `read_pixels`, for the bytes of a picture."""
    with opened(content) as image:
        return square_pixels(image, side)


@dataclass(frozen=True)
class Seen:
    """What the decoding of a picture has shown."""

    notes: list[str]  # what a person may want to know
    width: int  # in pixels, the right way up
    height: int
    digest: bytes  # of all its pixels: two files with one digest are the same picture


def look_at_picture(source: Path | bytes | memoryview) -> Seen:
    """Decode a picture at its full size. DataError if it cannot be decoded."""
    with opened(source) as image:
        is_turned = orientation_of(image) != 1  # before TIFF is loaded, which turns it
        rgb = as_rgb(image)
        notes = ["turned upright, as EXIF says"] if is_turned else []
        if image.mode.startswith("I") and has_12_bits(image, int(np.asarray(image).max())):
            notes.append("16-bit picture with values below 4096, read as 12 bits")
        if image.format != "MPO" and getattr(image, "is_animated", False):  # MPO: a photo and its preview
            notes.append("several frames or pages, of which the first is read")
        digest = hashlib.sha256(b"%d x %d " % rgb.size)
        digest.update(rgb.tobytes())
        return Seen(notes, *rgb.size, digest.digest())


def thumbnail(content: bytes | memoryview, side: int) -> Image.Image:
    """A whole picture, scaled so that its longer side has at most `side` pixels."""
    with opened(content) as image:
        small = as_rgb(image)
        small.thumbnail((side, side))
        return small


@contextmanager
def _explained(where: str | None) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        error.where = error.where or where
        raise
    except _UNREADABLE as error:
        is_unknown = isinstance(error, UnidentifiedImageError)  # Pillow's text holds the address of an object
        raise DataError(
            "this picture cannot be read",
            where=where,
            got="cannot identify its format" if is_unknown else str(error) or type(error).__name__,
            hint="replace it or remove it",
        ) from error


@contextmanager
def opened(source: Path | bytes | memoryview) -> Iterator[Image.Image]:
    """A picture in a file or in memory. Every error is a DataError."""
    with _explained(str(source) if isinstance(source, Path) else None), _open(source) as image:
        yield image


def _open(source: Path | bytes | memoryview) -> Image.Image:
    """Reads the header only."""
    # Opening a FIFO would wait for a writer.
    if isinstance(source, Path) and not stat.S_ISREG(source.stat().st_mode):
        raise ValueError("not a regular file")
    image = Image.open(source if isinstance(source, Path) else BytesIO(source), formats=READ_FORMATS)
    if image.width * image.height > MOST_PIXELS:
        image.close()
        raise ValueError(f"{image.width} x {image.height} pixels are more than {MOST_PIXELS:,}")
    return image


def square_pixels(image: Image.Image, side: int) -> NDArray[np.uint8]:
    """Like `read_pixels`, for an open picture."""
    rgb = as_rgb(image)
    square = rgb.resize((side, side), Image.Resampling.BILINEAR, box=_central_square(*rgb.size))
    return np.asarray(square).transpose(2, 0, 1)


def as_rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB, 8 bits per colour, the right way up. DataError if it cannot be decoded."""
    with _explained(None):
        image.load()  # first: Pillow turns TIFF pictures when it loads them
        turn = _TURNS.get(orientation_of(image))
        image = _on_white(_as_8_bits(image))
        return image.transpose(turn) if turn is not None else image


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation, from 1 (upright) to 8."""
    try:
        value: int = image.getexif().get(_ORIENTATION, 1)
    except _UNREADABLE:
        return 1
    return value if value in _TURNS else 1


def _as_8_bits(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        return Image.fromarray(_bytes_of_floats(np.asarray(image)))
    if image.mode.startswith("I"):
        return Image.fromarray(_bytes_of_whole_numbers(image))
    return image


def _bytes_of_floats(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 1):  # also if one is NaN
        raise ValueError(f"its floats are from {low:g} to {high:g}; floats from 0 (black) to 1 (white) can be read")
    return np.rint(values * 255).astype(np.uint8)


def _bytes_of_whole_numbers(image: Image.Image) -> NDArray[np.uint8]:
    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 65535:
        raise ValueError(f"its values are from {low} to {high}; whole numbers from 0 to 65535 can be read")
    return (values >> (4 if has_12_bits(image, high) else 8)).astype(np.uint8)


def has_12_bits(image: Image.Image, high: int) -> bool:
    """Whether the values of a picture have 12 of their 16 bits. `high`: the largest of them."""
    stated = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE)
    return high < 4096 and (stated == (12,) or image.format not in _STATES_RANGE)


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")
    return image.convert("RGB")


def _central_square(width: int, height: int) -> tuple[float, float, float, float]:
    """The `box` argument for resize: the same pixels as scaling first and cropping afterwards, with less work."""
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    return left, top, left + short, top + short
