"""Encoded pictures (JPEG, PNG, ...) as samples: `encoded_pictures.py` gives their bytes, threads decode them.

Pixels depend on the picture, the decoder and, for a crop, on the sample's random bits. They do not depend on the
threads or on the batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.data.crops import BoxDraw, Crops
from paceline.data.dataset import Windows
from paceline.data.encoded_pictures import EncodedPictures
from paceline.data.jpeg_libraries import PILLOW, require_library
from paceline.data.pictures import DECODER, GREY
from paceline.data.regions import Pixels, decode_region, decode_square
from paceline.errors import DataError, UnavailableData
from paceline.settings.schema import DataConfig

Result = TypeVar("Result")
_log = logging.getLogger("paceline")


def encoded_dataset(
    pictures: EncodedPictures, labels: Tensor, side: int, config: DataConfig, *, sample_weights: Tensor | None = None
) -> EncodedDataset:
    """The data set that a config asks for."""
    require_library(config.decoder)
    return EncodedDataset(
        pictures,
        labels,
        side,
        config.num_workers,
        config.unreadable,
        library=config.decoder,
        sample_weights=sample_weights,
    )


def _empty_samples(count: int, sample_shape: tuple[int, ...]) -> Tensor:
    """Memory for decoded pictures: rows, columns, colours, as decoders write them and models read them."""
    return torch.empty((count, *sample_shape), dtype=torch.uint8, memory_format=torch.channels_last)


class EncodedDataset:
    """A data set of encoded pictures: each becomes its central square [3, side, side], or a random crop.

    `library`: what decodes JPEG. `sample_weights`: for weighted sampling.
    """

    def __init__(
        self,
        pictures: EncodedPictures,
        labels: Tensor,
        side: int,
        num_workers: int,
        unreadable: int = 0,
        *,
        library: str = PILLOW,
        sample_weights: Tensor | None = None,
    ) -> None:
        self.pictures = pictures
        self.decoder = DECODER if library == PILLOW else f"{DECODER} {library}"  # a part of the fingerprint
        self.library = library
        self.sample_shape = (3, side, side)
        self.sample_weights = sample_weights
        self.windows: Windows | None = None  # for data that exceeds its cache
        self._labels = labels
        self.num_workers = num_workers
        self._allowed = unreadable
        self._unreadable: set[int] = set()
        # Threads start with the first batch. A data set that is not read starts none.
        self._pool = ThreadPoolExecutor(num_workers, "reader") if num_workers else None
        self.if_slow = f"more --num-workers than {num_workers}" + (f", or {pictures.if_slow}" * bool(pictures.if_slow))

    @property
    def labels(self) -> Tensor:
        return self._labels

    def __len__(self) -> int:
        return len(self.pictures)

    def names(self) -> Iterable[bytes]:
        return self.pictures.names()

    def contents(self) -> tuple[str, str]:
        """For the fingerprint: what kind of contents, and their digest."""
        return self.pictures.kind, self.pictures.contents()

    def announce(self, ids: Tensor) -> None:
        """The samples that all ranks read next, in their order. Some sources fetch their files in this order."""
        announce = getattr(self.pictures, "announce", None)
        if announce is not None:
            announce(ids.cpu().numpy())

    def read(self, indices: Tensor) -> Tensor:
        batch = _empty_samples(len(indices), self.sample_shape)
        self.read_into(indices, batch)
        return batch

    def read_into(self, indices: Tensor, samples: Tensor) -> None:
        """Like `read`, into given memory. Each thread writes its pictures directly to their places."""
        self.in_threads(self._read_square, indices.tolist(), samples.numpy())

    def read_crops(self, indices: Tensor, crops: Crops) -> Tensor:
        """A random crop of each picture, flipped or not: uint8 [B, 3, side, side]."""
        batch = _empty_samples(len(indices), crops.sample_shape)
        self.read_crops_into(indices, crops, batch)
        return batch

    def read_crops_into(self, indices: Tensor, crops: Crops, samples: Tensor) -> None:
        read = partial(self._read_crop, interpolation=crops.interpolation)
        self.in_threads(read, indices.tolist(), samples.numpy(), crops.draws())

    def in_threads(self, work: Callable[..., Result], *arguments: Iterable[Any]) -> list[Result]:
        """Map a function over arguments, in the threads that decode."""
        return list(self._pool.map(work, *arguments) if self._pool else map(work, *arguments))

    def _read_square(self, index: int, place: Pixels) -> None:
        try:
            place[:] = decode_square(self.pictures.read(index), place.shape[-1], decoder=self.library)
        except UnavailableData:
            raise
        except DataError as error:
            self._replace_by_grey(index, place, error)

    def _read_crop(self, index: int, place: Pixels, draw: BoxDraw, interpolation: str) -> None:
        try:
            place[:] = decode_region(
                self.pictures.read(index),
                draw.box_in,
                place.shape[-1],
                decoder=self.library,
                interpolation=interpolation,
                is_flipped=draw.is_flipped,
            )
        except UnavailableData:
            raise
        except DataError as error:
            self._replace_by_grey(index, place, error)

    def _replace_by_grey(self, index: int, place: Pixels, error: DataError) -> None:
        """Raise the error if too many pictures cannot be read."""
        error.where = f"{self.pictures.where(index)}, sample {index} (read by {threading.current_thread().name})"
        is_new = index not in self._unreadable
        self._unreadable.add(index)
        if len(self._unreadable) > self._allowed:
            error.hint = f"replace it, remove it, or allow it: --unreadable {len(self._unreadable)}"
            raise error
        if is_new:
            _log.warning("warning: unreadable, replaced by grey: %s", error.where)
        place[:] = GREY
