"""The format of an index: a JSON header and arrays of numbers, with one checksum over all bytes. Imports no torch.

    paceline-index 1\\n    a header line with the length of the JSON text in bytes
    {...}                  facts, and the type and length of each array
    arrays                 one after the other, each at a multiple of 8 bytes
    CRC-32                 of everything before, 8 hexadecimal digits

An index can be made again from its data at any time. So a reader answers None to one that is damaged, of another
version or of other data, and the caller makes it again. Forged numbers are checked by those who use them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.pack_format import crc32_of
from paceline.runs.drafts import draft_of, write_draft
from paceline.settings.small_files import parse_json, read_small

_MAGIC = b"paceline-index 1 "
_ALIGNED = 8
_SEAL_BYTES = 8
_LARGEST_BYTES = 2**36
_TYPES = ("uint8", "uint32", "int32", "int64")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class IndexFile:
    facts: dict[str, Any]
    arrays: Arrays


def write_index(path: Path, facts: Mapping[str, Any], arrays: Arrays) -> None:
    """Complete or absent: written under another name, then renamed."""
    body = {"facts": dict(facts), "arrays": {name: [str(values.dtype), len(values)] for name, values in arrays.items()}}
    text = json.dumps(body).encode()
    head = _MAGIC + b"%d\n" % len(text) + text
    parts = [head, *(np.ascontiguousarray(values).tobytes() for values in arrays.values())]
    content = b"".join(part + bytes(-len(part) % _ALIGNED) for part in parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    try:
        write_draft(draft, content + b"%08x" % crc32_of(content))
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def read_index(path: Path) -> IndexFile | None:
    """None if there is none, or none that can be used."""
    try:
        content = read_small(path, _LARGEST_BYTES)
        return _parse(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _parse(content: bytes) -> IndexFile:
    if content[-_SEAL_BYTES:] != b"%08x" % crc32_of(memoryview(content)[:-_SEAL_BYTES]):
        raise ValueError("its checksum does not match")
    line, _, _ = content[:64].partition(b"\n")
    if not line.startswith(_MAGIC):
        raise ValueError("not an index of this version")
    start, length = len(line) + 1, int(line.removeprefix(_MAGIC))
    if length < 0:
        raise ValueError("an impossible length")
    body = parse_json(content[start : start + length], allows_raw_bytes=True)
    if not isinstance(body["facts"], dict):
        raise ValueError("no facts")
    place, arrays = _aligned(start + length), {}
    for name, (kind, count) in body["arrays"].items():
        if kind not in _TYPES or not isinstance(count, int) or count < 0:
            raise ValueError("an impossible array")
        size_bytes = np.dtype(kind).itemsize * count
        if place + size_bytes > len(content) - _SEAL_BYTES:
            raise ValueError("an array beyond the end")
        arrays[name] = np.frombuffer(content, kind, count, place)
        place = _aligned(place + size_bytes)
    return IndexFile(body["facts"], arrays)


def _aligned(place: int) -> int:
    return place + -place % _ALIGNED


class TextArray:
    """Many short byte strings in two arrays: their bytes one after the other, and where each ends."""

    def __init__(self, content: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.content, self.ends = content, ends
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends
        if len(ends) and (int(ends[-1]) != len(content) or (starts > ends).any() or int(ends[0]) < 0):
            raise ValueError("texts beyond the end")

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> TextArray:
        ends = np.cumsum(np.fromiter((len(text) for text in texts), np.int64, len(texts)), dtype=np.int64)
        return cls(np.frombuffer(b"".join(texts), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> bytes:
        start = int(self.ends[number - 1]) if number else 0
        return self.content[start : int(self.ends[number])].tobytes()

    def to_list(self) -> list[bytes]:
        content, ends = self.content.tobytes(), self.ends.tolist()
        return [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def file_key(*parts: object) -> str:
    """A file name for an index or a copy: a hash of what it belongs to."""
    import hashlib

    return hashlib.sha256(os.fsencode("\0".join(map(str, parts)))).hexdigest()[:32]
