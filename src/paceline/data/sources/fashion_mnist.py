"""Fashion-MNIST from its four IDX files, plain or gzipped, downloaded if absent.

An IDX file states its element type and its dimensions. A file whose type, dimensions or size is wrong is refused.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.dataset import DatasetInfo, LoadedData, ResidentDataset
from paceline.data.fetch import fetch_file
from paceline.data.known_files import FASHION_MNIST_FOLDER as FOLDER
from paceline.data.known_files import FASHION_MNIST_MD5 as MD5
from paceline.data.known_files import find_fashion_mnist
from paceline.errors import DataError
from paceline.settings.schema import DataConfig

BASE_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
COUNTS = {"train": 60_000, "t10k": 10_000}
SIDE = 28
CLASSES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
MEAN = (0.2860,)
STD = (0.3530,)

_UNSIGNED_BYTE = 0x08


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return DatasetInfo(
        name="fashion-mnist",
        num_train=COUNTS["train"],
        num_test=COUNTS["t10k"],
        classes=CLASSES,
        sample_shape=(1, SIDE, SIDE),
        mean=MEAN,
        std=STD,
    )


def load(config: DataConfig, seed: int) -> LoadedData:
    data_dir = Path(config.data_dir)
    return LoadedData(describe(config, seed), _half(data_dir, "train"), _half(data_dir, "t10k"))


def _half(data_dir: Path, prefix: str) -> ResidentDataset:
    count = COUNTS[prefix]
    images_path = _locate(data_dir, f"{prefix}-images-idx3-ubyte")
    labels_path = _locate(data_dir, f"{prefix}-labels-idx1-ubyte")
    images = _read_idx(images_path, (count, SIDE, SIDE))
    labels = _read_idx(labels_path, (count,))
    if labels.max() >= len(CLASSES):
        raise _damaged(labels_path, f"label {labels.max()}", "labels from 0 to 9")
    samples = torch.from_numpy(images).reshape(count, 1, SIDE, SIDE)
    return ResidentDataset(samples, torch.from_numpy(labels.astype(np.int64)))


def _locate(data_dir: Path, name: str) -> Path:
    """The path of the file, plain or gzipped. Downloads it if it is absent."""
    if found := find_fashion_mnist(data_dir, name):
        return found
    packed = f"{name}.gz"
    return fetch_file(
        BASE_URL + packed,
        data_dir / FOLDER / packed,
        checksum=MD5[name],
        algorithm="md5",
        what=f"Fashion-MNIST ({packed})",
    )


def _read_idx(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The bytes of an IDX file, which must have exactly this shape."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(16 + math.prod(shape) + 1)  # bounded: a small file may unpack to any size
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, str(error) or type(error).__name__, "a whole file") from error
    rank = len(shape)
    header_bytes = 4 + 4 * rank
    if content[:4] != bytes((0, 0, _UNSIGNED_BYTE, rank)) or len(content) < header_bytes:
        raise _damaged(path, f"a file that begins {content[:4].hex(' ') or 'nowhere'}", f"00 00 08 {rank:02x}")
    found = tuple(int(number) for number in np.frombuffer(content, dtype=">u4", count=rank, offset=4))
    if found != shape:
        raise _damaged(path, f"dimensions {found}", f"dimensions {shape}")
    size = header_bytes + math.prod(shape)
    if len(content) != size:
        raise _damaged(path, f"{len(content):,} bytes", f"exactly {size:,} bytes")
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape).copy()


def _damaged(path: Path, got: str, allowed: str) -> DataError:
    return DataError(
        "this Fashion-MNIST file is damaged",
        where=str(path),
        got=got,
        allowed=allowed,
        hint="delete it and it will be downloaded again",
    )
