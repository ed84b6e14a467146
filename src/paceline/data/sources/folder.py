"""Pictures in folders, one folder per class, read by a pool of threads.

`data/picture_folder.py` finds the pictures, `data/pictures.py` decodes them. Pixels do not depend on the number of
threads. `packed.py` reads folders that `paceline data pack` has packed.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.dataset import DatasetInfo, LoadedData
from paceline.data.pack_format import picture_side
from paceline.data.picture_folder import Part, Pictures, find_pictures
from paceline.data.picture_set import labels_of, picture_info
from paceline.data.pictures import DECODER, GREY, read_pixels
from paceline.errors import DataError
from paceline.settings.resolution import largest_size
from paceline.settings.schema import DataConfig

_log = logging.getLogger("paceline")
_STAT_THREADS = 16


class FolderDataset:
    """Pictures read from disk, batch by batch."""

    decoder = DECODER

    def __init__(
        self, root: Path, part: Part, side: int, num_workers: int, unreadable: int = 0, *, labels: Tensor | None = None
    ) -> None:
        self.root = root
        self.paths = part.paths
        self._labels = labels_of(part.per_class) if labels is None else labels
        self.sample_shape = (3, side, side)
        self._allowed = unreadable
        self._unreadable: set[int] = set()
        # Threads start with the first batch. A data set that is not read starts none.
        self._pool = ThreadPoolExecutor(num_workers, "reader") if num_workers else None
        packed = f"{root}-packed" if root.name else "PACKED"
        self.if_slow = f"more --num-workers than {num_workers}, or pack the pictures once: "
        self.if_slow += f"paceline data pack {root} {packed}, then --data-dir {packed}"

    @property
    def labels(self) -> Tensor:
        return self._labels

    def __len__(self) -> int:
        return len(self.paths)

    def names(self) -> list[bytes]:
        """File names relative to the data set's folder, in the order of samples."""
        folder = os.fsencode(self.root / "x")[:-1]
        return [os.fsencode(path).removeprefix(folder) for path in self.paths]

    def list_files(self) -> list[tuple[bytes, int]]:
        """Names and sizes. On network storage each size costs a round trip, so several threads ask."""
        with ThreadPoolExecutor(_STAT_THREADS, "stat") as pool:
            sizes = pool.map(_size_of, self.paths, chunksize=256)
            return list(zip(self.names(), sizes, strict=True))

    def read(self, indices: Tensor) -> Tensor:
        batch = torch.empty((len(indices), *self.sample_shape), dtype=torch.uint8)
        self.read_into(indices, batch)
        return batch

    def read_into(self, indices: Tensor, samples: Tensor) -> None:
        """Like `read`, into given memory. Each thread writes its pictures directly to their places."""
        run = self._pool.map if self._pool else map
        for _ in run(self._read_one, indices.tolist(), samples.numpy()):
            pass

    def _read_one(self, index: int, place: NDArray[np.uint8]) -> None:
        path = self.paths[index]
        try:
            place[:] = read_pixels(path, self.sample_shape[-1])
        except DataError as error:
            error.where = f"{path}, sample {index} (read by {threading.current_thread().name})"
            is_new = index not in self._unreadable
            self._unreadable.add(index)
            if len(self._unreadable) > self._allowed:
                error.hint = f"replace it, remove it, or allow it: --unreadable {len(self._unreadable)}"
                raise
            if is_new:
                _log.warning("warning: unreadable, replaced by grey: %s", error.where)
            place[:] = GREY


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1  # reading the file reports the error


def read_picture(path: Path, side: int) -> Tensor:
    """A picture as uint8 [3, side, side]: its central square, scaled."""
    return torch.from_numpy(np.array(read_pixels(path, side), order="C"))


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return _info(find_pictures(Path(config.data_dir)), config)


def load(config: DataConfig, seed: int) -> LoadedData:
    pictures = find_pictures(Path(config.data_dir))
    info = _info(pictures, config)
    side, workers = info.sample_shape[-1], config.num_workers
    parts = {name: FolderDataset(pictures.root, part, side, workers, config.unreadable) for name, part in pictures}
    return LoadedData(info, **parts)


def _info(pictures: Pictures, config: DataConfig) -> DatasetInfo:
    sizes = {name: len(part.paths) for name, part in pictures}
    folders = {name: part.folder for name, part in pictures}
    info = picture_info(pictures.classes, sizes, picture_side(largest_size(config)), folders)
    return replace(info, num_skipped=len(pictures.skipped))
