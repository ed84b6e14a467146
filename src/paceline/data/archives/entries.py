"""What one archive holds: pictures by name, place and label. The same for tar, zip and parquet files. No torch."""

from __future__ import annotations

import posixpath
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.archives.index_file import IndexFile, TextArray
from paceline.data.parts import hidden_reason
from paceline.data.pictures import ABSENT_EXTENSIONS, EXTENSIONS, MOST_PIXELS
from paceline.errors import DataError, printable_line

# How a picture is kept: plain bytes, a member of a zip file with its header (numbers of that format), a parquet row.
STORED, PLAIN, DEFLATED, ROW = 0, 1, 8, 255
LARGEST_PICTURE_BYTES = 3 * MOST_PIXELS + 2**20  # the largest picture that is decoded, not compressed
NO_LABEL = "-1"  # the mark of Hugging Face
_FEW_NAMES = 3
_FIELDS = {"starts": "int64", "sizes": "int64", "stored": "int64", "methods": "uint8", "crcs": "uint32"}


@dataclass
class Entries:
    """The pictures of one archive, in its order."""

    names: list[bytes] = field(default_factory=list)
    labels: list[bytes] = field(default_factory=list)  # empty, or one for each picture
    starts: list[int] = field(default_factory=list)  # where it begins (zip: its header), or its row
    sizes: list[int] = field(default_factory=list)  # of the picture
    stored: list[int] = field(default_factory=list)  # bytes in the file
    methods: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)  # 0: none is known
    skipped: dict[str, list[str]] = field(default_factory=dict)  # a few names, by reason
    num_skipped: Counter[str] = field(default_factory=Counter)
    classes: list[str] | None = None  # names of numbered labels, if the archive has them

    def add(self, name: bytes, start: int, size: int, stored: int, method: int = PLAIN, crc: int = 0) -> None:
        self.names.append(name)
        self.starts.append(start)
        self.sizes.append(size)
        self.stored.append(stored)
        self.methods.append(method)
        self.crcs.append(crc)

    def skip(self, reason: str, name: str) -> None:
        self.num_skipped[reason] += 1
        names = self.skipped.setdefault(reason, [])
        if len(names) < _FEW_NAMES:
            names.append(name)

    def facts(self) -> dict[str, object]:
        skipped = {reason: [count, self.skipped[reason]] for reason, count in self.num_skipped.items()}
        return {"skipped": skipped, "classes": self.classes}

    def arrays(self) -> dict[str, NDArray[Any]]:
        names, labels = TextArray.of(self.names), TextArray.of(self.labels)
        numbers: dict[str, NDArray[Any]] = {name: np.array(getattr(self, name), kind) for name, kind in _FIELDS.items()}
        texts: dict[str, NDArray[Any]] = {
            "names": names.content,
            "name_ends": names.ends,
            "labels": labels.content,
            "label_ends": labels.ends,
        }
        return {**numbers, **texts}

    @classmethod
    def from_index(cls, index: IndexFile) -> Entries:
        """ValueError, KeyError or TypeError if the arrays do not fit together."""
        arrays = index.arrays
        found = cls(
            TextArray(arrays["names"], arrays["name_ends"]).to_list(),
            TextArray(arrays["labels"], arrays["label_ends"]).to_list(),
            **{name: arrays[name].tolist() for name in _FIELDS},
            classes=index.facts["classes"],
        )
        count = len(found.names)
        if any(len(getattr(found, name)) != count for name in _FIELDS) or len(found.labels) not in (0, count):
            raise ValueError("arrays of different lengths")
        for reason, (number, names) in index.facts["skipped"].items():
            found.num_skipped[reason] = int(number)
            found.skipped[reason] = [str(name) for name in names]
        if found.classes is not None and not all(isinstance(name, str) for name in found.classes):
            raise ValueError("a class without a name")
        return found


def clean_name(name: str, where: str) -> str:
    """A name in an archive, relative and without `.`. DataError if it leads outside of the archive."""
    plain = name.removeprefix("./")
    parts = plain.split("/")
    if not plain or plain.startswith("/") or ".." in parts or "\0" in plain or "\\" in plain:
        raise DataError(
            "a name in this archive is empty or leads outside of it",
            where=where,
            got=printable_line(name)[:200],
            allowed="relative names without ..",
            hint="nothing is unpacked, but such an archive is not what a data set should be; make it again",
        )
    return posixpath.normpath(plain)


def row_name(file: str, row: int) -> str:
    """The name of a picture in a parquet file that has no name of its own."""
    return f"{posixpath.basename(file).removesuffix('.parquet')}-{row:08}"


def skip_reason(name: str) -> str:
    """Why a file of an archive is no picture; empty if it is one."""
    for part in name.split("/"):
        if reason := hidden_reason(part):
            return reason
    extension = posixpath.splitext(name)[1].lower()
    if extension in ABSENT_EXTENSIONS:
        return f"{extension}: this Pillow has no decoder for it"
    return "" if extension in EXTENSIONS else f"{extension or 'no extension'}: not the name of a picture that is read"


def damaged_archive(where: str, got: object, hint: str = "copy or download it again") -> DataError:
    return DataError("this archive cannot be read", where=where, got=got, hint=hint)


def check_picture_size(size: int, name: str, where: str) -> None:
    if size > LARGEST_PICTURE_BYTES:
        raise DataError(
            "a picture in this archive is too large",
            where=f"{where}: {printable_line(name)[:200]}",
            got=f"{size:,} bytes",
            allowed=f"at most {LARGEST_PICTURE_BYTES:,}",
        )
