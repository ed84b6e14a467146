"""Tar and zip files of pictures, and their indexes in a cache that other users may write."""

from __future__ import annotations

import json
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from fuzz.mutations import mutate_bytes, mutate_json
from fuzz.sandbox import Format, Reader

_CATALOG, _ENTRIES = "all.catalog", "all.entries"


def _build(kind: str, samples: Path, folder: Path) -> None:
    """An archive, and copies of its indexes under names that do not depend on the folder."""
    from harness.archive_files import as_tree, make_pictures, write_tar, write_zip

    pictures = make_pictures(folder / "pictures", {"train": 2, "test": 1}, side=8)
    (folder / "data").mkdir()
    if kind == "tar":
        write_tar(folder / "data" / "all.tar", [*as_tree(pictures), ("notes.txt", b"x")])
    elif kind == "webdataset":
        members = as_tree(pictures / "train")
        labels = [(name.replace(".jpg", ".json"), json.dumps({"label": name[:3]}).encode()) for name, _ in members]
        for part in ("train", "test"):
            write_tar(folder / "data" / f"{part}.tar", [*members, *labels])
    else:
        write_zip(pictures, folder / "data" / "all.zip", zipfile.ZIP_DEFLATED)
    _load(folder)
    (index,) = (folder / "cache" / "indexes").glob("*.catalog")
    (folder / _CATALOG).write_bytes(index.read_bytes())
    entries = sorted((folder / "cache" / "indexes").glob("*.entries"))
    (folder / _ENTRIES).write_bytes(entries[0].read_bytes())


def _index(folder: Path) -> None:
    """Only the index: many times as fast as the whole data set."""
    from paceline.data.archives.indexing import index_file
    from paceline.data.archives.places import LocalPlace

    place = LocalPlace(folder / "data")
    for file in place.list():
        index_file(place, file, lambda size: None)


def _load(folder: Path) -> None:
    import torch
    from PIL import Image

    from paceline.data.registry import load_dataset
    from paceline.settings.schema import DataConfig

    Image.init()  # imports the decoders of all formats
    config = DataConfig(
        dataset="folder", data_dir=str(folder / "data"), cache_dir=str(folder / "cache"), image_size=8, num_workers=0
    )
    data = load_dataset(config, 0)
    for _, part in data.parts():
        part.read(torch.arange(len(part)))


def _read_catalog(folder: Path) -> None:
    """Every picture of a catalog that is accepted. One that is not is made again."""
    from paceline.data.archives.indexing import _read_catalog
    from paceline.data.archives.pictures import ArchivePictures
    from paceline.data.archives.places import LocalPlace
    from paceline.errors import DataError

    place = LocalPlace(folder / "data")
    catalog = _read_catalog(folder / _CATALOG, place.list())
    for part in catalog.parts if catalog else ():
        pictures = ArchivePictures(catalog, part, place)  # type: ignore[arg-type]
        pictures.contents()
        for index in range(min(len(pictures), 50)):
            pictures.where(index)
            with suppress(DataError):
                pictures.read(index)


def _read_entries(folder: Path) -> None:
    from paceline.data.archives.entries import Entries
    from paceline.data.archives.index_file import read_index
    from paceline.data.archives.indexing import _UNUSABLE

    index = read_index(folder / _ENTRIES)
    if index is not None:
        with suppress(*_UNUSABLE):
            Entries.from_index(index)


def _mutate_index(data: bytes, draw: Random) -> bytes:
    """The whole file, or only its header; with a correct checksum in three of four cases."""
    from paceline.data.pack_format import crc32_of

    body = data[:-8]
    line, _, rest = body.partition(b"\n")
    length = int(line.rpartition(b" ")[2])
    if draw.randrange(2):
        text = mutate_json(rest[:length], draw)
        head = line.rpartition(b" ")[0] + b" %d\n" % len(text) + text
        arrays = (
            rest[length:].lstrip(b"\0") if draw.randrange(8) == 0 else body[-(-(len(line) + 1 + length) // 8) * 8 :]
        )
        body = head + bytes(-len(head) % 8) + arrays
    else:
        body = mutate_bytes(body, draw)
    return body + (b"%08x" % crc32_of(body) if draw.randrange(4) else data[-8:])


def _archive(name: str, kind: str, file: str) -> Format:
    load = Reader("train on archives", _load, every=16, changes_folder=True)
    return Format(name, partial(_build, kind), file, mutate_bytes, (Reader("index", _index), load))


FORMATS = (
    _archive("archive.tar", "tar", "data/all.tar"),
    _archive("webdataset.tar", "webdataset", "data/train.tar"),
    _archive("archive.zip", "zip", "data/all.zip"),
    Format("index of an archive", partial(_build, "zip"), _ENTRIES, _mutate_index, (Reader("read", _read_entries),)),
    Format("catalog of archives", partial(_build, "tar"), _CATALOG, _mutate_index, (Reader("read", _read_catalog),)),
)
