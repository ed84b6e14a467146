"""Reads data files from copies in the cache of this machine, and fetches the copies in the order an epoch needs them.

A store has its files far away; of a parquet file only a plain copy can be read by number. A picture whose file has no
copy yet is read from its place at once: training does not wait for whole files. No torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.archives.arrange import part_word
from paceline.data.archives.entries import Entries
from paceline.data.archives.file_cache import FileCache, Outcome
from paceline.data.archives.index_file import file_key
from paceline.data.archives.parquet_files import index_parquet, read_row_group
from paceline.data.archives.places import PARQUET, TAR, DataFile, LocalPlace
from paceline.data.archives.schedule import Schedule
from paceline.data.archives.store_place import StorePlace
from paceline.data.archives.tar_files import index_tar
from paceline.data.archives.zip_files import index_zip
from paceline.data.parts import TEST, part_named
from paceline.errors import PacelineError

_log = logging.getLogger("paceline")
_FETCHING = 4  # files at the same time, per rank
_BUSY_PAUSE_S = 0.05
_FULL = "note: the cache of the data has no more room; the rest is read from its place, which is slower"
_KEPT_GROUPS = 2  # pieces of parquet files in memory, if there is no room for copies


class CopiedFiles:
    """Safe to use from several threads. Several ranks fetch each file once."""

    def __init__(self, place: LocalPlace | StorePlace, files: tuple[DataFile, ...], cache: FileCache) -> None:
        self._place, self._files, self._cache = place, files, cache
        self.limit_bytes = cache.limit_bytes
        self._keys = {file: file_key(place.name, file.name, file.size_bytes, file.version) for file in files}
        self._numbers = {file: number for number, file in enumerate(files)}
        self._own = frozenset(self._keys.values())
        self._schedule = Schedule()
        self._has_fetchers = False
        self._lock = threading.Lock()
        self._groups: OrderedDict[tuple[str, int], tuple[int, list[bytes]]] = OrderedDict()
        self._told: set[str] = set()

    def read_range(self, file: DataFile, start: int, size: int) -> bytes:
        content = self._cache.read(self._keys[file], start, size)
        return self._place.read_range(file, start, size) if content is None else content

    def read_row(self, file: DataFile, row: int, start: int, size: int) -> bytes:
        """A picture of a parquet file. Waits for the copy of its file: nothing else is fast."""
        content = self._cache.read(self._keys[file], start, size)
        if content is None:
            while self._add(file) == Outcome.BUSY:
                time.sleep(_BUSY_PAUSE_S)
            content = self._cache.read(self._keys[file], start, size)
        if content is None:
            self._tell(_FULL, once="full")
            content = self._read_from_group(file, row)
        return content

    def read_again(self, file: DataFile, row: int | None, start: int, size: int) -> bytes:
        """After a damaged copy: drop it, and read the origin. `row`: of a parquet file."""
        self.drop_damaged(file)
        if row is None:
            return self._place.read_range(file, start, size)
        return self._read_from_group(file, row)

    def drop_damaged(self, file: DataFile) -> None:
        self._tell(f"warning: the copy of {self._place.where(file.name)} in the cache is damaged; it is fetched again")
        self._cache.drop(self._keys[file])

    def index(self, file: DataFile, advance: Callable[[int], None]) -> Entries:
        """Index a file, and keep its copy if there is room."""
        where = self._place.where(file.name)
        if file.kind not in (TAR, PARQUET):
            with self._place.open(file) as stream:
                return index_zip(stream, where)
        made: list[Entries] = []

        def write(draft: Path) -> None:
            made.append(self._index_copy(file, draft, advance))

        while not made and self._cache.add(self._keys[file], file.size_bytes, write, own=self._own, keep=()) == "busy":
            time.sleep(_BUSY_PAUSE_S)
        if made:
            return made[0]
        if file.kind == TAR and (copy := self._cache.open(self._keys[file])) is not None:
            with copy:
                return index_tar(copy, where, advance, with_checksums=True)
        with self._place.open(file) as stream:  # no room for a copy, or a copy without an index
            if file.kind == PARQUET:
                return index_parquet(stream, where, advance, is_test=_is_test(file))
            return index_tar(stream, where, advance, with_checksums=True)

    def announce(self, part: str, files: NDArray[np.int32]) -> None:
        """The files of the samples of an epoch, in their order: fetch those that have no copy."""
        self._schedule.announce(part, files)
        with self._lock:
            if not self._has_fetchers:
                self._has_fetchers = True
                for number in range(_FETCHING):
                    threading.Thread(target=self._fetch_all, name=f"fetch-{number}", daemon=True).start()

    def passed(self, part: str, position: int) -> None:
        """The sample at this position of the announced order was read."""
        self._schedule.passed(part, position)

    def _fetch_all(self) -> None:
        while True:
            number = self._schedule.take()
            file = self._files[number]
            try:
                outcome = self._add(file)
            except (OSError, PacelineError) as error:  # reading a picture of it says more
                self._tell(f"warning: {file.name} is not copied into the cache: {error}".splitlines()[0])
                outcome = Outcome.FULL
            self._schedule.done(number, outcome)
            if outcome == Outcome.FULL:
                self._tell(_FULL, once="full")

    def _add(self, file: DataFile) -> Outcome:
        key = self._keys[file]
        if self._cache.holds(key):
            return Outcome.KEPT
        needed = self._schedule.needed_before(self._numbers[file])
        keep = self._own if needed is None else {self._keys[self._files[number]] for number in needed}
        return self._cache.add(key, file.size_bytes, partial(self._write_copy, file), own=self._own, keep=keep)

    def _write_copy(self, file: DataFile, draft: Path) -> None:
        if file.kind == PARQUET:
            self._unpack(file, draft, lambda size: None)
        else:
            assert isinstance(self._place, StorePlace)
            self._place.fetch(file, draft)

    def _index_copy(self, file: DataFile, draft: Path, advance: Callable[[int], None]) -> Entries:
        if file.kind == PARQUET:
            return self._unpack(file, draft, advance)
        self._write_copy(file, draft)
        with draft.open("rb") as stream:
            return index_tar(stream, self._place.where(file.name), advance, with_checksums=True)

    def _unpack(self, file: DataFile, draft: Path, advance: Callable[[int], None]) -> Entries:
        with self._place.open(file) as stream, draft.open("r+b") as copy:
            entries = index_parquet(stream, self._place.where(file.name), advance, copy, is_test=_is_test(file))
            copy.truncate()
            return entries

    def _read_from_group(self, file: DataFile, row: int) -> bytes:
        with self._lock:
            for (name, _), (first, pictures) in self._groups.items():
                if name == file.name and first <= row < first + len(pictures):
                    return pictures[row - first]
            with self._place.open(file) as stream:
                first, pictures = read_row_group(stream, self._place.where(file.name), row)
            self._groups[file.name, first] = first, pictures
            while len(self._groups) > _KEPT_GROUPS:
                self._groups.popitem(last=False)
            return pictures[row - first]

    def _tell(self, line: str, once: str | None = None) -> None:
        with self._lock:
            if (once or line) in self._told:
                return
            self._told.add(once or line)
        _log.warning(line)


def _is_test(file: DataFile) -> bool:
    return part_named(part_word(file.name)) == TEST
