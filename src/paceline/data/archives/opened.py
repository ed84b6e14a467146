"""Opens the archives of a data folder or store: their catalog, and readers of their pictures. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data.archives.catalog import Catalog
from paceline.data.archives.copies import CopiedFiles
from paceline.data.archives.file_cache import FileCache
from paceline.data.archives.indexing import index_file, list_archives, load_catalog
from paceline.data.archives.places import PARQUET, LocalPlace
from paceline.data.archives.store_place import StorePlace
from paceline.data.parts import TRAIN
from paceline.runs.stores import is_url
from paceline.settings.schema import DataConfig
from paceline.settings.values import cache_folder

if TYPE_CHECKING:  # it imports torch
    from paceline.data.archives.pictures import ArchivePictures

_INDEXES, _COPIES = "indexes", "data"
_IF_SLOW = "a larger --cache-gb, or --cache-dir on a faster disk"


@dataclass(frozen=True)
class OpenedArchives:
    place: LocalPlace | StorePlace
    catalog: Catalog
    copies: CopiedFiles | None  # None: files are read where they are

    def window(self) -> int:
        """How many training files are read at a time, so that two windows of them fit into the cache; 0: all."""
        if self.copies is None:
            return 0
        used = sorted(set(self.catalog.parts[TRAIN].columns["files"].tolist()))
        sizes = [self.catalog.files[number].size_bytes for number in used]
        if sum(sizes) <= self.copies.limit_bytes:
            return 0
        most: int = self.copies.limit_bytes // (2 * max(sizes))
        return max(1, most)

    def pictures(self, part: str) -> ArchivePictures:
        from paceline.data.archives.pictures import ArchivePictures

        return ArchivePictures(self.catalog, part, self.place, self.copies, _IF_SLOW if self.copies else "")


def open_archives(config: DataConfig) -> OpenedArchives:
    """Indexes archives that are new or have changed."""
    folder = Path(config.cache_dir) if config.cache_dir else cache_folder()
    place = StorePlace(config.data_dir) if is_url(config.data_dir) else LocalPlace(Path(config.data_dir))
    files = tuple(list_archives(place))
    copies = None
    if isinstance(place, StorePlace) or files[0].kind == PARQUET:
        copies = CopiedFiles(place, files, FileCache(folder / _COPIES, round(config.cache_gb * 1e9)))
    make = copies.index if copies else partial(index_file, place)
    return OpenedArchives(place, load_catalog(place, folder / _INDEXES, make), copies)
