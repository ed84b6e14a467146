"""Encoded pictures in a packed data set (`paceline data pack --format encoded`). Imports no torch.

A shard holds the bytes of its pictures, then an index with one entry per picture, then their names. The index is mapped
into memory, so a million entries are there at once and take no memory of their own. Pictures are read by `pread`: a
damaged disk or a truncated file is an error with a name, where a map would end the process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.encoded_pictures import FILES
from paceline.data.pack_format import ENTRY_BYTES, Packed, Shard, encoded_bytes
from paceline.errors import DataError

ENTRY = np.dtype([("start", "<u8"), ("bytes", "<u4"), ("width", "<u4"), ("height", "<u4"), ("name_end", "<u4")])
assert ENTRY.itemsize == ENTRY_BYTES


class PackedPictures:
    """One part of a packed data set."""

    kind = FILES  # as for a folder of the same pictures
    if_slow = "a faster disk for the packed pictures"

    def __init__(self, folder: Path, packed: Packed, part: str) -> None:
        self._folder = folder
        self._shards = packed.shards_of(part)
        self._per_shard = packed.pictures_per_shard
        self._num_pictures = packed.num_pictures(part)
        self._contents = packed.contents.get(part, "")
        self._files: list[int] = []
        weakref.finalize(self, _close, self._files)
        for shard in self._shards:
            self._files.append(_open(folder / shard.file))
        self._indexes = [_map_index(folder / shard.file, shard) for shard in self._shards]

    def __len__(self) -> int:
        return self._num_pictures

    def names(self) -> Iterator[bytes]:
        for shard, file, index in zip(self._shards, self._files, self._indexes, strict=True):
            names = os.pread(file, shard.names_bytes, encoded_bytes(shard) - shard.names_bytes)
            start = 0
            for end in index["name_end"].tolist():
                yield names[start:end]
                start = end

    def sizes(self) -> NDArray[np.uint32]:
        """Width and height of each picture, the right way up: [N, 2]."""
        found = [np.stack([index["width"], index["height"]], 1) for index in self._indexes]
        return np.concatenate(found) if found else np.zeros((0, 2), np.uint32)

    def where(self, index: int) -> str:
        shard, row = divmod(index, self._per_shard)
        return f"{self._folder / self._shards[shard].file}, picture {row}"

    def read(self, index: int) -> bytes:
        shard, row = divmod(index, self._per_shard)
        start, size = self._indexes[shard][["start", "bytes"]][row].item()
        if start + size > self._shards[shard].pictures_bytes:  # before memory is allocated for it
            raise self._damaged(index, f"its index names {size:,} bytes at {start:,}")
        try:
            content = os.pread(self._files[shard], size, start)
        except OSError as error:
            raise self._damaged(index, error.strerror) from error
        if len(content) != size:
            raise self._damaged(index, f"{len(content):,} bytes at {start:,} instead of {size:,}")
        return content

    def files(self) -> Iterator[tuple[bytes, int]]:
        """Names and sizes in bytes."""
        sizes = (size for index in self._indexes for size in index["bytes"].tolist())
        return zip(self.names(), sizes, strict=True)

    def contents(self) -> str:
        return self._contents

    def _damaged(self, index: int, got: str | None) -> DataError:
        shard = self._shards[index // self._per_shard].file
        hint = f"delete it, then: paceline data pack PICTURES {self._folder}\nmakes only that one again"
        return DataError(f"shard {shard} is damaged", where=self.where(index), got=got, hint=hint)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise DataError("this shard cannot be read", where=str(path), got=error.strerror) from error


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _map_index(path: Path, shard: Shard) -> NDArray[np.void]:
    try:
        return np.memmap(path, ENTRY, "r", shard.pictures_bytes, (shard.pictures,))
    except (OSError, ValueError) as error:
        raise DataError("the index of this shard cannot be mapped into memory", where=str(path), got=error) from error
