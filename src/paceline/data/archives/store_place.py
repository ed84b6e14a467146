"""Data files in an object store (s3:// or any other store of fsspec). No torch."""

from __future__ import annotations

import io
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar, cast

from paceline.data.archives.places import DataFile, choose_archives, is_archive
from paceline.errors import DataError
from paceline.runs.patience import data_unreadable_now, read_patiently
from paceline.runs.stores import Store, StoreError, explain, open_store

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_T = TypeVar("_T")
_WHERE = "data-dir"
_READ_BYTES = 2**23  # a request for a file that is read from beginning to end


class StorePlace:
    """A prefix in a store, or one archive in it. Safe to use from several threads."""

    def __init__(self, url: str) -> None:
        url = url.rstrip("/")
        self._only = posixpath.basename(url) if is_archive(url) else ""
        self._url = posixpath.dirname(url) if self._only else url
        self.name = self._url
        self._opened: Store | None = None

    @property
    def _store(self) -> Store:
        if self._opened is None:
            self._opened = open_store(self._url, _WHERE)
        return self._opened

    def list(self) -> list[DataFile]:
        """A store that does not answer is explained at once: usually its name or the credentials are wrong."""
        try:
            found = self._store.list(self._only)
        except StoreError as error:
            raise explain(self._store, _WHERE, error) from error
        if self._only:
            names = [self._only] if self._only in found else []
        else:
            names = choose_archives([name for name in found if name.count("/") < 2], _folders(list(found)))
        files = []
        for name in names:
            about = found[name]
            files.append(DataFile(name, about.size_bytes, about.etag or about.modified))
        return files

    def where(self, name: str) -> str:
        return f"{self.name}/{name}"

    def open(self, file: DataFile) -> IO[bytes]:
        return cast(IO[bytes], io.BufferedReader(_StoredFile(self, file), _READ_BYTES))

    def read_range(self, file: DataFile, start: int, size: int) -> bytes:
        wanted = max(0, min(size, file.size_bytes - start))

        def read() -> bytes:
            content = self._store.read_range(file.name, start, start + size)
            if len(content) < wanted:
                raise StoreError(f"{len(content):,} bytes at {start:,} instead of {wanted:,}")
            return content

        return self._patiently(file.name, read)

    def fetch(self, file: DataFile, target: Path) -> None:
        """A whole file. DataError if it has another size than when it was listed."""

        def get() -> None:
            self._store.get(file.name, target)
            found = target.stat().st_size
            if found == file.size_bytes:
                return
            about = self._store.info(file.name)
            if about is not None and about.size_bytes == file.size_bytes:
                raise StoreError(f"{found:,} of {file.size_bytes:,} bytes")
            raise DataError(
                "a file in the store has changed",
                where=self.where(file.name),
                got=f"{found:,} bytes",
                allowed=f"{file.size_bytes:,} bytes, as when the run started",
            )

        self._patiently(file.name, get)

    def read_side_file(self, name: str) -> bytes | None:
        try:
            return self._store.read(name)
        except StoreError:
            return None

    def _patiently(self, name: str, request: Callable[[], _T]) -> _T:
        where = self.where(name)

        def ask() -> _T:
            try:
                return request()
            except StoreError as error:
                if isinstance(error.__cause__, FileNotFoundError | PermissionError):  # waiting would not help
                    raise DataError("this file cannot be read from the store", where=where, got=error) from error
                raise

        return read_patiently(f"the store of the data ({name})", where, ask, data_unreadable_now)


class _StoredFile(io.RawIOBase):
    """A file of a store that can seek. Each read is a request, and is repeated as all requests are."""

    def __init__(self, place: StorePlace, file: DataFile) -> None:
        self._place, self._file, self._position = place, file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        if start + offset < 0:
            raise OSError("a place before the begin of the file")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        if self._position >= self._file.size_bytes:
            return 0
        content = self._place.read_range(self._file, self._position, len(view))
        view[: len(content)] = content
        self._position += len(content)
        return len(content)


def _folders(names: list[str]) -> dict[str, bool]:
    """The folders at the top of a store, and whether they have folders in them."""
    folders: dict[str, bool] = {}
    for name in names:
        first, *rest = name.split("/")
        if rest:
            folders[first] = folders.get(first, False) or len(rest) > 1
    return folders
