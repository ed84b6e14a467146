"""The pictures of all archives of a data set: parts and classes, in the order in which a folder has them. No torch.

Samples are sorted by class and name, as in a folder of the same pictures. So a folder, tar, zip and parquet files train
the same weights.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.archives.arrange import Row, arrange
from paceline.data.archives.entries import PLAIN, ROW, STORED, Entries
from paceline.data.archives.index_file import IndexFile, TextArray
from paceline.data.archives.places import DataFile
from paceline.data.parts import PARTS, TEST, TRAIN
from paceline.settings.text import find_fault

_FIELDS = {
    "files": "int32",
    "starts": "int64",
    "sizes": "int64",
    "stored": "int64",
    "methods": "uint8",
    "crcs": "uint32",
}


@dataclass(frozen=True)
class CatalogPart:
    """The pictures of a part, class by class and in each class by name."""

    names: TextArray
    columns: dict[str, NDArray[Any]]
    per_class: tuple[int, ...]
    origin: str  # the names of the archives, for people

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Catalog:
    files: tuple[DataFile, ...]
    classes: tuple[str, ...]
    parts: dict[str, CatalogPart]
    skipped: dict[str, tuple[int, list[str]]]  # number and a few names, by reason

    @property
    def num_skipped(self) -> int:
        return sum(number for number, _ in self.skipped.values())

    def facts(self) -> dict[str, Any]:
        return {
            "files": [[file.name, file.size_bytes, file.version] for file in self.files],
            "classes": list(self.classes),
            "parts": {name: [list(part.per_class), part.origin] for name, part in self.parts.items()},
            "skipped": {reason: [number, names] for reason, (number, names) in self.skipped.items()},
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        found: dict[str, NDArray[Any]] = {}
        for name, part in self.parts.items():
            found |= {f"{name}/{column}": values for column, values in part.columns.items()}
            found |= {f"{name}/names": part.names.content, f"{name}/name_ends": part.names.ends}
        return found


def make_catalog(
    files: Iterable[DataFile], entries: list[Entries], class_names: list[str] | None, where: str
) -> Catalog:
    """DataError if parts, classes or labels are missing, or if a name is there twice."""
    files = tuple(files)
    classes, rows, origins = arrange([file.name for file in files], entries, class_names, where)
    parts = {name: _part(rows[name], entries, len(classes), origins[name]) for name in PARTS if rows.get(name)}
    number, names = Counter[str](), dict[str, list[str]]()
    for file, found in zip(files, entries, strict=True):
        number.update(found.num_skipped)
        for reason, some in found.skipped.items():
            names.setdefault(reason, []).extend(f"{file.name}: {name}" for name in some)
    skipped = {reason: (count, names[reason][:3]) for reason, count in number.items()}
    return Catalog(files, tuple(classes), parts, skipped)


def _part(rows: list[Row], entries: list[Entries], num_classes: int, origin: str) -> CatalogPart:
    # As a folder sorts: by class, then by name as text.
    rows = sorted(rows, key=lambda row: (row.label, os.fsdecode(row.name)))
    picked = {
        column: np.array([getattr(entries[row.file], column)[row.entry] for row in rows], kind)
        for column, kind in _FIELDS.items()
        if column != "files"
    }
    per_class = np.bincount([row.label for row in rows], minlength=num_classes)
    columns = {"files": np.array([row.file for row in rows], _FIELDS["files"]), **picked}
    return CatalogPart(TextArray.of([row.name for row in rows]), columns, tuple(per_class.tolist()), origin)


def read_catalog(index: IndexFile) -> Catalog:
    """ValueError, KeyError or TypeError if its numbers do not fit together or lead outside of the files."""
    facts = index.facts
    files = tuple(DataFile(str(name), int(size), str(version)) for name, size, version in facts["files"])
    classes = tuple(facts["classes"])
    if not all(isinstance(name, str) and find_fault(name) is None for name in classes):
        raise ValueError("a class has an impossible name")
    if not {TRAIN, TEST} <= facts["parts"].keys() <= set(PARTS):
        raise ValueError("impossible parts")
    parts = {}
    for name in PARTS:
        if name in facts["parts"]:
            per_class, origin = facts["parts"][name]
            columns = {column: index.arrays[f"{name}/{column}"] for column in _FIELDS}
            names = TextArray(index.arrays[f"{name}/names"], index.arrays[f"{name}/name_ends"])
            parts[name] = CatalogPart(names, columns, tuple(int(size) for size in per_class), str(origin))
            _check(parts[name], files, len(classes))
    skipped = {str(reason): (int(count), list(map(str, names))) for reason, (count, names) in facts["skipped"].items()}
    return Catalog(files, classes, parts, skipped)


def _check(part: CatalogPart, files: tuple[DataFile, ...], num_classes: int) -> None:
    columns, count = part.columns, len(part)
    if any(len(columns[column]) != count or str(columns[column].dtype) != kind for column, kind in _FIELDS.items()):
        raise ValueError("columns of different lengths")
    if len(part.per_class) != num_classes or min(part.per_class, default=0) < 0 or sum(part.per_class) != count:
        raise ValueError("not one size for each class")
    if not count or columns["files"].min() < 0 or columns["files"].max() >= len(files):
        raise ValueError("a picture of no file")
    sizes = np.array([file.size_bytes for file in files], np.int64)[columns["files"]]
    is_plain = columns["methods"] != ROW
    if min(columns[name].min() for name in ("starts", "sizes", "stored")) < 0:
        raise ValueError("a negative place")
    if ((columns["starts"] > sizes) | (columns["stored"] > sizes - columns["starts"]))[is_plain].any():
        raise ValueError("a picture beyond the end of its file")
    is_stored = np.isin(columns["methods"], (PLAIN, STORED))
    if (columns["stored"] != columns["sizes"])[is_stored].any():
        raise ValueError("a picture of two sizes")
