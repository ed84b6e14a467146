"""Folders of pictures: their files, halves, classes and pixels. Imports no torch.

The layout is DATA_DIR/train/CLASS/PICTURE and DATA_DIR/test/CLASS/PICTURE. Without a train folder it is
DATA_DIR/CLASS/PICTURE, and about every fifth picture is kept for the test. The split depends only on the file name.
Adding pictures does not move existing ones. The `folder` source and `paceline data pack` both read pictures here, so
they see the same pixels.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.errors import DataError
from paceline.settings.text import check_text

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})
TEST_ONE_IN = 5
# Pillow raises these for damaged pictures. MemoryError: the file states a wrong length.
_UNREADABLE = (
    *(OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError, MemoryError),
    *(IndexError, KeyError, TypeError, AttributeError, OverflowError, ZeroDivisionError, RecursionError),
)
GREY = 128  # replaces a picture that cannot be read
LAYOUT = "train/CLASS/PICTURE and test/CLASS/PICTURE, or CLASS/PICTURE"


@dataclass(frozen=True)
class Half:
    """The training or the test pictures, class by class and in each class by name."""

    paths: list[Path]
    per_class: list[int]


@dataclass(frozen=True)
class Pictures:
    """All pictures of a folder; none of them has been opened."""

    root: Path
    classes: tuple[str, ...]
    train: Half
    test: Half

    def halves(self) -> Iterator[tuple[str, Half]]:
        yield "train", self.train
        yield "test", self.test


def read_pixels(path: Path, side: int) -> NDArray[np.uint8]:
    """A picture as [3, side, side]: its central square, scaled. The array is a view of [side, side, 3]."""
    try:
        with Image.open(path) as image:
            return square_pixels(image, side)
    except _UNREADABLE as error:
        raise DataError(
            "this picture cannot be read",
            where=str(path),
            got=str(error) or type(error).__name__,
            hint="replace it or remove it",
        ) from error


def square_pixels(image: Image.Image, side: int) -> NDArray[np.uint8]:
    """Like `read_pixels`, for an open picture."""
    square = _as_rgb(image).resize((side, side), Image.Resampling.BILINEAR, box=_central_square(*image.size))
    return np.asarray(square).transpose(2, 0, 1)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: Pillow would clip it to white instead of scaling it
        image = image.point(lambda level: level * (1 / 256)).convert("L")
    if "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _central_square(width: int, height: int) -> tuple[float, float, float, float]:
    """The `box` argument for resize: the same pixels as scaling first and cropping afterwards, with less work."""
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    return left, top, left + short, top + short


def find_pictures(root: Path) -> Pictures:
    """Class names and file names; opens no picture."""
    classes, train, test = _two_folders(root) if (root / "train").is_dir() else _one_folder(root)
    return Pictures(root, classes, train, test)


def _two_folders(root: Path) -> tuple[tuple[str, ...], Half, Half]:
    if not (root / "test").is_dir():
        raise DataError("there is a train folder but no test folder", where=str(root), allowed=LAYOUT)
    train, test = _by_class(root / "train"), _by_class(root / "test")
    if train.keys() != test.keys():
        only = [f"{name}: only in train" for name in sorted(train.keys() - test.keys())]
        only += [f"{name}: only in test" for name in sorted(test.keys() - train.keys())]
        raise DataError(
            "train and test do not hold the same classes",
            where=str(root),
            got=", ".join(only[:8]) + (f" and {len(only) - 8} more" if len(only) > 8 else ""),
            allowed="one folder per class, of the same name, in both",
        )
    return tuple(train), _half(train), _half(test)


def _one_folder(root: Path) -> tuple[tuple[str, ...], Half, Half]:
    found = _by_class(root)
    kept = {name: [path for path in paths if not _is_test(path, root)] for name, paths in found.items()}
    held = {name: [path for path in paths if _is_test(path, root)] for name, paths in found.items()}
    if not all(kept.values()) or not any(held.values()):
        raise DataError(
            "there are too few pictures to split off a test set",
            where=str(root),
            got=", ".join(f"{name}: {len(paths)}" for name, paths in list(found.items())[:8]),
            hint="add pictures, or sort them into train/ and test/ yourself",
        )
    return tuple(found), _half(kept), _half(held)


def _is_test(path: Path, root: Path) -> bool:
    digest = hashlib.sha256(os.fsencode(path.relative_to(root).as_posix())).digest()  # a name may not be UTF-8
    return int.from_bytes(digest[:8]) % TEST_ONE_IN == 0


def _half(pictures: dict[str, list[Path]]) -> Half:
    paths = [path for group in pictures.values() for path in group]
    return Half(paths, [len(group) for group in pictures.values()])


def _by_class(folder: Path) -> dict[str, list[Path]]:
    """Pictures per class. Classes and pictures are sorted by name."""
    try:
        names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
        for name in names:
            # The folder name becomes the class name in JSON, tables, pages and label files.
            check_text(name, "the name of a class folder", where=str(folder), hint="rename the folder")
        found = {name: _pictures_of(folder / name) for name in names}
    except OSError as error:
        raise DataError("this folder cannot be read", where=str(folder), got=error.strerror) from error
    if len(found) < 2:
        raise _too_little(folder, f"{len(found)} class folders" + (f": {names[0]}" if names else ""))
    if empty := [name for name, paths in found.items() if not paths]:
        raise _too_little(folder, "no pictures in " + ", ".join(empty[:8]))
    return found


def _pictures_of(folder: Path) -> list[Path]:
    names = sorted(e.name for e in os.scandir(folder) if e.is_file() and not e.name.startswith("."))
    return [folder / name for name in names if os.path.splitext(name)[1].lower() in EXTENSIONS]  # noqa: PTH122


def _too_little(folder: Path, got: str) -> DataError:
    return DataError(
        "there is no training data in this folder",
        where=str(folder.absolute()),
        got=got,
        allowed=f"two or more class folders with pictures ({', '.join(sorted(EXTENSIONS))})",
        hint=f"arrange the pictures as {LAYOUT}",
    )
