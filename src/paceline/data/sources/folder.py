"""Pictures in folders, one folder per class, read by a pool of threads.

DATA_DIR/train/CLASS/PICTURE and DATA_DIR/test/CLASS/PICTURE; without a train folder, DATA_DIR/CLASS/
PICTURE with about every fifth picture kept for the test. A picture's half depends on its own name alone,
so that adding pictures moves none. Pixels do not depend on the number of threads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from paceline.config.schema import DataConfig
from paceline.data.dataset import DatasetInfo, LoadedData
from paceline.errors import DataError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})
MEAN = (0.485, 0.456, 0.406)  # of ImageNet, as pretrained weights expect
STD = (0.229, 0.224, 0.225)
TEST_ONE_IN = 5
_GREY = 128
LAYOUT = "train/CLASS/PICTURE and test/CLASS/PICTURE, or CLASS/PICTURE"

_log = logging.getLogger("paceline")


@dataclass(frozen=True)
class _Half:
    paths: list[Path]
    labels: list[int]


class FolderDataset:
    """Pictures read from disk, batch by batch."""

    def __init__(self, half: _Half, side: int, num_workers: int, unreadable: int = 0) -> None:
        self._paths = half.paths
        self._labels = torch.tensor(half.labels, dtype=torch.int64)
        self._side = side
        self._allowed = unreadable
        self._unreadable: set[int] = set()
        # Threads start with the first batch, so an unread data set costs none.
        self._pool = ThreadPoolExecutor(num_workers, "reader") if num_workers else None

    @property
    def labels(self) -> Tensor:
        return self._labels

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, indices: Tensor) -> Tensor:
        wanted = indices.tolist()
        run = self._pool.map if self._pool else map
        batch = torch.empty((len(wanted), 3, self._side, self._side), dtype=torch.uint8)
        for place, picture in enumerate(run(self._read_one, wanted)):
            batch[place] = picture
        return batch

    def _read_one(self, index: int) -> Tensor:
        path = self._paths[index]
        try:
            return read_picture(path, self._side)
        except DataError as error:
            error.where = f"{path}, sample {index} (read by {threading.current_thread().name})"
            is_new = index not in self._unreadable
            self._unreadable.add(index)
            if len(self._unreadable) > self._allowed:
                error.hint = f"replace it, remove it, or allow for it: --unreadable {len(self._unreadable)}"
                raise
            if is_new:
                _log.warning("warning: unreadable, grey instead: %s", error.where)
            return torch.full((3, self._side, self._side), _GREY, dtype=torch.uint8)


def read_picture(path: Path, side: int) -> Tensor:
    """A picture as uint8 [3, side, side]: its central square, scaled."""
    try:
        with Image.open(path) as image:
            square = _as_rgb(image).resize((side, side), Image.Resampling.BILINEAR, box=_central_square(*image.size))
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise DataError(
            "this picture cannot be read",
            where=str(path),
            got=str(error) or type(error).__name__,
            hint="replace it or remove it",
        ) from error
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit grey: Pillow would clip it to white instead of scaling it
        image = image.point(lambda level: level * (1 / 256)).convert("L")
    if "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")


def _central_square(width: int, height: int) -> tuple[float, float, float, float]:
    """As `box` of a resize, this gives the pixels of scaling first and cutting afterwards, for less work."""
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    return left, top, left + short, top + short


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return _scan(config)[0]


def load(config: DataConfig, seed: int) -> LoadedData:
    info, train, test = _scan(config)
    side, workers = info.sample_shape[-1], config.num_workers
    parts = [FolderDataset(half, side, workers, config.unreadable) for half in (train, test)]
    return LoadedData(info, parts[0], parts[1])


def picture_side(image_size: int) -> int:
    """The side pictures are kept at: a little more than the model sees, to leave room for crops."""
    return round(image_size * 256 / 224)


def _scan(config: DataConfig) -> tuple[DatasetInfo, _Half, _Half]:
    """Class names and file names; opens no picture."""
    root = Path(config.data_dir)
    classes, train, test = _two_folders(root) if (root / "train").is_dir() else _one_folder(root)
    side = picture_side(config.image_size)
    info = DatasetInfo(
        name="folder",
        num_train=len(train.paths),
        num_test=len(test.paths),
        classes=classes,
        sample_shape=(3, side, side),
        mean=MEAN,
        std=STD,
    )
    return info, train, test


def _two_folders(root: Path) -> tuple[tuple[str, ...], _Half, _Half]:
    if not (root / "test").is_dir():
        raise DataError("there is a train folder but no test folder", where=str(root), allowed=LAYOUT)
    train, test = _pictures(root / "train"), _pictures(root / "test")
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


def _one_folder(root: Path) -> tuple[tuple[str, ...], _Half, _Half]:
    found = _pictures(root)
    kept = {name: [path for path in paths if not _is_test(path, root)] for name, paths in found.items()}
    held = {name: [path for path in paths if _is_test(path, root)] for name, paths in found.items()}
    if not all(kept.values()) or not any(held.values()):
        raise DataError(
            "there are too few pictures to cut a test set from them",
            where=str(root),
            got=", ".join(f"{name}: {len(paths)}" for name, paths in list(found.items())[:8]),
            hint="add pictures, or sort them into train/ and test/ yourself",
        )
    return tuple(found), _half(kept), _half(held)


def _is_test(path: Path, root: Path) -> bool:
    digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
    return int.from_bytes(digest[:8]) % TEST_ONE_IN == 0


def _half(pictures: dict[str, list[Path]]) -> _Half:
    paths = [path for group in pictures.values() for path in group]
    labels = [label for label, group in enumerate(pictures.values()) for _ in group]
    return _Half(paths, labels)


def _pictures(folder: Path) -> dict[str, list[Path]]:
    """Per class in order of its name, its pictures in order of theirs."""
    try:
        names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
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
        "there is nothing to learn from in this folder",
        where=str(folder.absolute()),
        got=got,
        allowed=f"two or more class folders with pictures ({', '.join(sorted(EXTENSIONS))})",
        hint=f"arrange the pictures as {LAYOUT}",
    )
