"""Encoded pictures that are files of their own: of a folder, or of the paths in a table."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paceline.data.encoded_pictures import FILES, digest_of_files
from paceline.errors import DataError

_STAT_THREADS = 16
_MOST_BYTES = 2**31  # of one file


class PictureFiles:
    """The pictures at these paths. Names are relative to `root`."""

    kind = FILES

    def __init__(self, root: Path, paths: Sequence[Path], if_slow: str = "") -> None:
        self.root = root
        self.paths = paths
        self.if_slow = if_slow

    def __len__(self) -> int:
        return len(self.paths)

    def names(self) -> list[bytes]:
        folder = os.fsencode(self.root / "x")[:-1]
        return [os.fsencode(path).removeprefix(folder) for path in self.paths]

    def where(self, index: int) -> str:
        return str(self.paths[index])

    def read(self, index: int) -> bytes:
        return read_picture_file(self.paths[index])

    def contents(self) -> str:
        # On network storage each size costs a round trip, so several threads ask.
        with ThreadPoolExecutor(_STAT_THREADS, "stat") as pool:
            sizes = pool.map(_size_of, self.paths, chunksize=256)
            return digest_of_files(zip(self.names(), sizes, strict=True))


def read_picture_file(path: Path) -> bytes:
    """The bytes of a file. DataError if it cannot be read."""
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:  # noqa: PTH123
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise _unreadable(path, "not a regular file")
            if found.st_size > _MOST_BYTES:
                raise _unreadable(path, f"{found.st_size:,} bytes are more than {_MOST_BYTES:,}")
            return file.read()
    except OSError as error:
        raise _unreadable(path, error.strerror or type(error).__name__) from error


def _unreadable(path: Path, got: str) -> DataError:
    return DataError("this picture cannot be read", where=str(path), got=got, hint="replace it or remove it")


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1  # reading the file reports the error
