"""Data files in an object store (s3:// or any other store of fsspec). No torch."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import IO, TypeVar, cast

from paceline.data.archives.places import DataFile, choose_archives, is_archive
from paceline.errors import DataError
from paceline.runs.patience import data_unreadable_now, read_patiently
from paceline.runs.stores import Store, StoreError, explain, open_store

_T = TypeVar("_T")
_WHERE = "data-dir"


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
        return cast(IO[bytes], self._patiently(file.name, lambda: self._store.open(file.name)))

    def read_range(self, file: DataFile, start: int, size: int) -> bytes:
        return self._patiently(file.name, lambda: self._store.read_range(file.name, start, start + size))

    def fetch(self, file: DataFile, target: Path) -> None:
        """A whole file. OSError if it has another size than when it was listed."""
        self._patiently(file.name, lambda: self._store.get(file.name, target))
        found = target.stat().st_size
        if found != file.size_bytes:
            raise DataError(
                "a file in the store has changed",
                where=self.where(file.name),
                got=f"{found:,} bytes",
                allowed=f"{file.size_bytes:,} bytes, as when the run started",
            )

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


def _folders(names: list[str]) -> dict[str, bool]:
    """The folders at the top of a store, and whether they have folders in them."""
    folders: dict[str, bool] = {}
    for name in names:
        first, *rest = name.split("/")
        if rest:
            folders[first] = folders.get(first, False) or len(rest) > 1
    return folders
