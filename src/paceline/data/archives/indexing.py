"""Indexes archives once, and keeps the indexes in the cache folder. Imports no torch.

Each archive has its own index, so an interrupted indexing continues with the next archive, and a new archive does not
index the others again. The catalog is made from them, sorted and complete: a run reads only this one. The names of both
hold a hash of the size and the time of the data, so an index of changed data is not found and made again. Two processes
may index at the same time: one waits for the other, and files are renamed when they are complete.
"""

from __future__ import annotations

import fcntl
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.data.archives.catalog import Catalog, make_catalog, read_catalog
from paceline.data.archives.entries import Entries
from paceline.data.archives.index_file import file_key, read_index, write_index
from paceline.data.archives.places import CLASS_NAMES, TAR, DataFile, Place
from paceline.data.archives.tar_files import index_tar
from paceline.data.archives.zip_files import index_zip
from paceline.data.pictures import EXTENSIONS
from paceline.errors import DataError

_log = logging.getLogger("paceline")
_RULES = 2  # change it with what an index holds, or how names and labels are read
_LINE_EVERY_S = 2.0
_UNUSABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
IndexOne = Callable[[DataFile, Callable[[int], None]], Entries]


def load_catalog(place: Place, folder: Path, index_one: IndexOne) -> Catalog:
    """The catalog of all archives of a place. Indexes what is not indexed yet, with progress on stderr."""
    files = list_archives(place)
    class_names = place.read_side_file(CLASS_NAMES)
    key = file_key(place.name)
    path = folder / f"{key}-{file_key(_RULES, sorted(EXTENSIONS), class_names, *files)}.catalog"
    found = _read_catalog(path, files)
    if found is not None:
        return found
    with _alone(folder / f"{key}.lock"):
        found = _read_catalog(path, files)
        if found is not None:
            return found
        progress = _Progress(sum(file.size_bytes for file in files))
        entries = [_entries(place, file, folder, index_one, progress) for file in files]
        catalog = make_catalog(files, entries, _parse_class_names(class_names, place), place.name)
        if list_archives(place) != files:
            raise DataError("the archives have changed while they were indexed", where=place.name, hint="try again")
        _keep(path, catalog)
        for old in folder.glob(f"{key}-*.catalog"):
            if old != path:
                old.unlink(missing_ok=True)
    return catalog


def list_archives(place: Place) -> list[DataFile]:
    files = place.list()
    if not files:
        raise DataError(
            "there are no archives here",
            where=place.name,
            allowed="tar, zip or parquet files",
            hint="folders and packed data sets are read from a disk: copy them there",
        )
    kinds = sorted({file.kind for file in files})
    if len(kinds) > 1:
        raise DataError(
            "archives of several kinds are one data set", where=place.name, got=", ".join(kinds), allowed="one kind"
        )
    return files


def index_file(place: Place, file: DataFile, advance: Callable[[int], None]) -> Entries:
    """Read an archive where it is."""
    where = place.where(file.name)
    try:
        with place.open(file) as stream:
            return index_tar(stream, where, advance) if file.kind == TAR else index_zip(stream, where)
    except OSError as error:
        raise DataError("this archive cannot be read", where=where, got=error.strerror or error) from error


def _entries(place: Place, file: DataFile, folder: Path, make: IndexOne, progress: _Progress) -> Entries:
    about = [place.name, file.name, file.size_bytes, file.version]
    path = folder / f"{file_key(_RULES, sorted(EXTENSIONS), *about)}.entries"
    index = read_index(path)
    if index is not None and index.facts.get("of") == about:
        try:
            found = Entries.from_index(index)
            progress.skip(file)
            return found
        except _UNUSABLE:
            pass
    found = make(file, progress.advance)
    progress.finish(file)
    try:
        write_index(path, {**found.facts(), "of": about}, found.arrays())
    except OSError as error:
        _warn_once(folder, error)
    return found


def _read_catalog(path: Path, files: list[DataFile]) -> Catalog | None:
    index = read_index(path)
    if index is None:
        return None
    try:
        catalog = read_catalog(index)
    except _UNUSABLE:
        return None
    return catalog if list(catalog.files) == files else None


def _keep(path: Path, catalog: Catalog) -> None:
    try:
        write_index(path, catalog.facts(), catalog.arrays())
    except OSError as error:
        _warn_once(path.parent, error)


_warned: set[Path] = set()


def _warn_once(folder: Path, error: OSError) -> None:
    if folder not in _warned:
        _warned.add(folder)
        _log.warning("warning: the index cannot be kept, so each start makes it again: %s: %s", folder, error.strerror)


def _parse_class_names(content: bytes | None, place: Place) -> list[str] | None:
    if content is None:
        return None
    try:
        names = [line.strip() for line in content.decode().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DataError("this file is not UTF-8 text", where=place.where(CLASS_NAMES)) from error
    if len(set(names)) < len(names):
        raise DataError("a class name is there twice", where=place.where(CLASS_NAMES))
    return names


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock. Without one, two processes would make the same index twice, which costs only time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("ab")
    except OSError:
        yield
        return
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another process that indexes this data", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield


class _Progress:
    """A line on stderr every few seconds; none if it takes a moment."""

    def __init__(self, total_bytes: int) -> None:
        self._total = max(1, total_bytes)
        self._before = self._done = 0
        self._first = self._told = time.monotonic()

    def advance(self, size_bytes: int) -> None:
        self._done += size_bytes
        if time.monotonic() - self._told >= _LINE_EVERY_S:
            self._told = time.monotonic()
            gb = self._total / 1e9
            print(f"indexing the archives: {self._done / self._total:.0%} of {gb:,.1f} GB", file=sys.stderr, flush=True)

    def finish(self, file: DataFile) -> None:
        """All bytes of a file are behind, however many of them were announced."""
        self._before += file.size_bytes
        self._done = self._before
        self.advance(0)

    def skip(self, file: DataFile) -> None:
        self._before += file.size_bytes
        self._done = self._before
