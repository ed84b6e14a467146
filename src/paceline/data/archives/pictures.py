"""The pictures of archives by number, for `data/encoded.py`."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from paceline.data.archives.catalog import Catalog
from paceline.data.archives.copies import CopiedFiles
from paceline.data.archives.entries import PLAIN, ROW
from paceline.data.archives.places import DataFile, Place
from paceline.data.archives.zip_files import data_start, unpack_member
from paceline.data.encoded_pictures import FILES, digest_of_files
from paceline.data.pack_format import crc32_of
from paceline.errors import DataError, printable_line

_HEADER_BYTES = 30 + 512  # of a zip member: usually enough for its name and extra field


class ArchivePictures:
    """The pictures of one part. Safe to use from several threads."""

    kind = FILES

    def __init__(
        self, catalog: Catalog, part: str, place: Place, copies: CopiedFiles | None = None, if_slow: str = ""
    ) -> None:
        self._files = catalog.files
        self._part_name, self._part = part, catalog.parts[part]
        self._place = place
        self._copies = copies
        self._reader = copies or place
        self._positions: NDArray[np.int64] | None = None  # of the samples in the order of the epoch
        self.if_slow = if_slow
        columns = self._part.columns
        self._columns = [columns[name] for name in ("files", "starts", "sizes", "stored", "methods", "crcs")]

    def __len__(self) -> int:
        return len(self._part)

    def names(self) -> list[bytes]:
        return self._part.names.to_list()

    def where(self, index: int) -> str:
        file = self._files[int(self._part.columns["files"][index])]
        return f"{self._place.where(file.name)}: {printable_line(os.fsdecode(self._part.names[index]))}"

    def announce(self, ids: NDArray[np.int64]) -> None:
        """The order of an epoch, of all ranks: copies of files are fetched in this order."""
        if self._copies is not None:
            positions = np.full(len(self), -1, np.int64)
            positions[ids] = np.arange(len(ids))
            self._positions = positions
            self._copies.announce(self._part_name, self._part.columns["files"][ids])

    def read(self, index: int) -> bytes:
        number, start, size, stored, method, crc = (int(column[index]) for column in self._columns)
        file = self._files[number]
        try:
            if method in (PLAIN, ROW):
                content = self._read_plain(file, start, size, stored, method, crc)
            else:
                content = self._read_member(file, start, stored, method, size, crc)
        except (OSError, ValueError) as error:
            got = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise DataError(
                "this picture cannot be read",
                where=self.where(index),
                got=got,
                hint="is the archive complete? paceline data check names every damaged picture",
            ) from error
        if self._copies is not None and self._positions is not None:
            self._copies.passed(self._part_name, int(self._positions[index]))
        return content

    def _read_plain(self, file: DataFile, start: int, size: int, row: int, method: int, crc: int) -> bytes:
        """With a checksum, a damaged copy is dropped and the picture is read again."""
        is_row = method == ROW
        if is_row and self._copies is not None:
            content = self._copies.read_row(file, row, start, size)
        else:
            content = self._reader.read_range(file, start, size)
        if self._copies is not None and not _is_whole(content, size, crc):
            content = self._copies.read_again(file, row if is_row else None, start, size)
        self._require(content, size)
        if not _is_whole(content, size, crc):
            raise ValueError("its CRC-32 is not the one it had when it was indexed")
        return content

    def _read_member(self, file: DataFile, start: int, stored: int, method: int, size: int, crc: int) -> bytes:
        """Of a zip file. If a copy is damaged and its origin is not, the copy is dropped."""
        try:
            return self._unpack_from(self._reader, file, start, stored, method, size, crc)
        except ValueError:
            if self._copies is None:
                raise
            content = self._unpack_from(self._place, file, start, stored, method, size, crc)
            self._copies.drop_damaged(file)
            return content

    def _unpack_from(
        self, reader: CopiedFiles | Place, file: DataFile, start: int, stored: int, method: int, size: int, crc: int
    ) -> bytes:
        content = reader.read_range(file, start, _HEADER_BYTES + stored)
        skip = data_start(content)
        if skip + stored > len(content):
            content, skip = reader.read_range(file, start + skip, stored), 0
        return unpack_member(self._require(content[skip : skip + stored], stored), method, size, crc)

    def _require(self, content: bytes, size: int) -> bytes:
        if len(content) != size:
            raise ValueError(f"{len(content):,} of {size:,} bytes: the archive is shorter than when it was indexed")
        return content

    def contents(self) -> str:
        return digest_of_files(zip(self.names(), self._part.columns["sizes"].tolist(), strict=True))


def _is_whole(content: bytes, size: int, crc: int) -> bool:
    return len(content) == size and (not crc or crc32_of(content) == crc)
