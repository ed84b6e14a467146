"""Indexes tar files: folder trees, and WebDataset shards (`KEY.jpg` beside `KEY.cls` or `KEY.json`). No torch.

Nothing is unpacked. Links, devices, sparse files and names that lead outside are refused: no program that writes
pictures for training makes them.
"""

from __future__ import annotations

import io
import os
import posixpath
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import IO, cast

from paceline.data.archives.entries import (
    NO_LABEL,
    Entries,
    check_picture_size,
    clean_name,
    damaged_archive,
    skip_reason,
)
from paceline.data.pack_format import crc32_of
from paceline.errors import DataError, printable_line
from paceline.settings.small_files import parse_json

_LABEL_SUFFIXES = ("cls", "json")
_JSON_KEYS = ("label", "cls", "class", "class_name", "category", "wnid")
_LARGEST_LABEL_BYTES = 2**20
_LARGEST_LABEL_TEXT = 200
_LARGEST_HEADER_BYTES = 2**20  # of a long name or of pax records
_LARGEST_PADDING_BYTES = 2**20  # zeros behind the end: tar fills its last record
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
_HINT = "pack the pictures as plain files: tar --format=pax -cf FILE FOLDER"


def index_tar(
    file: IO[bytes], where: str, advance: Callable[[int], None] = lambda size: None, *, with_checksums: bool = False
) -> Entries:
    """Reads headers and labels, for checksums also the pictures. `advance` gets the number of bytes that were read."""
    found, labels = Entries(), dict[str, bytes]()
    seen = set[str]()
    for member, name in _members(file, where, advance):
        if name in seen:
            raise DataError("a name is twice in this archive", where=where, got=printable_line(name), hint=_HINT)
        seen.add(name)
        key, suffix = _split_key(name)
        if suffix in _LABEL_SUFFIXES and not skip_reason(f"{key}.png"):
            label = _read_label(file, member, suffix, f"{where}: {printable_line(name)}")
            if label is not None:
                labels.setdefault(key, label)
                continue
        if reason := skip_reason(name):
            found.skip(reason, name)
            continue
        check_picture_size(member.size, name, where)
        crc = crc32_of(_read_member(file, member)) if with_checksums else 0
        found.add(os.fsencode(name), member.offset_data, member.size, member.size, crc=crc)
    if labels:
        _attach_labels(found, labels, where)
    return found


def _attach_labels(found: Entries, labels: dict[str, bytes], where: str) -> None:
    keys = [_split_key(os.fsdecode(name))[0] for name in found.names]
    if missing := [name for name, key in zip(found.names, keys, strict=True) if key not in labels]:
        raise DataError(
            "a picture has no label",
            where=where,
            got=printable_line(os.fsdecode(missing[0])) + (f", and {len(missing) - 1} more" if missing[1:] else ""),
            allowed="KEY.cls or KEY.json (with the member label) for each KEY.jpg",
        )
    if len(set(keys)) < len(keys):
        double = Counter(keys).most_common(1)[0][0]
        raise DataError("two pictures have the same key", where=where, got=printable_line(double))
    found.labels = [labels[key] for key in keys]
    for key in labels.keys() - set(keys):
        found.skip("a label without a picture", key)


def _members(file: IO[bytes], where: str, advance: Callable[[int], None]) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """Regular files with their names. DataError for a file that is no tar file, truncated or hostile."""
    size_bytes = file.seek(0, io.SEEK_END)
    _refuse_compressed(file, where)
    behind = 0
    try:
        with tarfile.open(fileobj=cast(IO[bytes], _Headers(file)), mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # a million headers would take a gigabyte
                if member.size < 0:
                    name = printable_line(member.name)[:200]
                    raise damaged_archive(where, f"it states {member.size:,} bytes for {name}")
                if member.offset_data + member.size > size_bytes:
                    raise damaged_archive(where, f"it is truncated in {printable_line(member.name)[:200]}")
                advance(member.offset_data - behind)
                behind = member.offset_data
                if member.isdir():
                    continue
                _refuse_special(member, where)
                yield member, clean_name(member.name, where)
            end = tar.offset
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise damaged_archive(where, str(error) or type(error).__name__) from error
    _require_end(file, end, where)
    advance(size_bytes - behind)


class _Headers:
    """What tarfile reads of a file: headers. It would allocate as much memory as a hostile header states."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > _LARGEST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self._file.read(size)


def _refuse_compressed(file: IO[bytes], where: str) -> None:
    file.seek(0)
    if kind := _COMPRESSED.get(file.read(2)):
        hint = f"unpack the {kind} compression once: pictures are compressed already"
        raise damaged_archive(where, f"it is compressed with {kind}, so no picture can be read alone", hint)
    file.seek(0)


def _refuse_special(member: tarfile.TarInfo, where: str) -> None:
    kinds = {
        "a link": member.issym() or member.islnk(),
        "a device or a pipe": member.isdev(),
        "a sparse file": member.issparse(),
        "of an unknown type": not member.isfile(),
    }
    if kind := next((kind for kind, is_it in kinds.items() if is_it), None):
        raise DataError(
            "this archive has a member that is no plain file",
            where=where,
            got=f"{printable_line(member.name)[:200]}: {kind}",
            allowed="folders and plain files",
            hint=_HINT if "link" not in kind else f"{_HINT} (with -h, which stores the files that links name)",
        )


def _require_end(file: IO[bytes], end: int, where: str) -> None:
    """A tar file ends with blocks of zeros. tarfile also ends, without an error, at a header that is damaged."""
    file.seek(end)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise damaged_archive(where, "it is truncated: its end is missing")
    if any(block):
        raise damaged_archive(where, f"there is no header at byte {end:,}")
    if any(file.read(_LARGEST_PADDING_BYTES)):  # a second archive: its pictures would be left out
        hint = "one file for each archive; tar --concatenate joins two"
        raise damaged_archive(where, f"there are more bytes behind its end at byte {end:,}", hint)


def _split_key(name: str) -> tuple[str, str]:
    """The key of a sample, and what follows its first dot, as WebDataset splits names."""
    folder, base = posixpath.split(name)
    stem, _, suffix = base.partition(".")
    return posixpath.join(folder, stem), suffix.lower()


def _read_label(file: IO[bytes], member: tarfile.TarInfo, suffix: str, where: str) -> bytes | None:
    """None for a JSON file without a label."""
    if member.size > _LARGEST_LABEL_BYTES:
        raise DataError("a label is too large", where=where, got=f"{member.size:,} bytes")
    content = _read_member(file, member)
    try:
        if suffix == "cls":
            label: object = content.decode().strip()
        else:
            values = parse_json(content)
            given = [values[key] for key in _JSON_KEYS if key in values] if isinstance(values, dict) else []
            if not given:
                return None
            label = given[0]
    except ValueError as error:  # also of text that is not UTF-8
        raise DataError("a label cannot be read", where=where, got=str(error)[:80]) from error
    text = "" if isinstance(label, bool) or not isinstance(label, str | int) else str(label)
    if not 0 < len(text) <= _LARGEST_LABEL_TEXT or text == NO_LABEL:
        raise DataError("a label is no class", where=where, got=repr(label)[:80], allowed="a name or a whole number")
    return text.encode()


def _read_member(file: IO[bytes], member: tarfile.TarInfo) -> bytes:
    place = file.tell()
    file.seek(member.offset_data)
    content = file.read(member.size)
    file.seek(place)
    return content
