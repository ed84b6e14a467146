"""Indexes zip files, and reads single pictures of them. Nothing is unpacked to disk. Imports no torch."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from typing import IO

from paceline.data.archives.entries import (
    DEFLATED,
    STORED,
    Entries,
    check_picture_size,
    clean_name,
    damaged_archive,
    skip_reason,
)
from paceline.data.pack_format import crc32_of
from paceline.errors import DataError, printable_line

_ENCRYPTED = 0x1
_HEADER = struct.Struct("<4s5H3I2H")  # the local header of a member, before its name and extra field
_MARK = b"PK\x03\x04"


def index_zip(file: IO[bytes], where: str) -> Entries:
    """Reads the central directory at the end of the file."""
    found, seen, ranges = Entries(), set[str](), []
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, struct.error, NotImplementedError, MemoryError) as error:
        raise damaged_archive(where, str(error) or type(error).__name__) from error
    for member in members:
        if member.filename.endswith("/"):
            continue
        name = clean_name(member.filename, where)
        if stat.S_ISLNK(member.external_attr >> 16):
            raise _refused(where, name, "a link", "plain files")
        if name in seen:
            raise DataError("a name is twice in this archive", where=where, got=printable_line(name))
        seen.add(name)
        ranges.append((member.header_offset, member.header_offset + _HEADER.size + member.compress_size))
        if reason := skip_reason(name):
            found.skip(reason, name)
            continue
        if member.flag_bits & _ENCRYPTED:
            raise _refused(where, name, "encrypted", "members without a password")
        if member.compress_type not in (STORED, DEFLATED):
            raise _refused(where, name, f"compression method {member.compress_type}", "stored or deflated members")
        check_picture_size(member.file_size, name, where)
        place = (member.header_offset, member.file_size, member.compress_size)
        found.add(os.fsencode(name), *place, member.compress_type, member.CRC)
    _refuse_overlaps(ranges, where)
    return found


def _refuse_overlaps(ranges: list[tuple[int, int]], where: str) -> None:
    """Members of a zip bomb share their bytes."""
    end = 0
    for start, stop in sorted(ranges):
        if start < end:
            raise damaged_archive(where, "members overlap, as in a zip bomb", "do not trust this file")
        end = stop


def _refused(where: str, name: str, got: str, allowed: str) -> DataError:
    return DataError(
        "a member of this archive cannot be used",
        where=where,
        got=f"{printable_line(name)[:200]}: {got}",
        allowed=allowed,
    )


def data_start(header: bytes) -> int:
    """How far behind the start of its local header a member's bytes begin. ValueError if it is no header."""
    if len(header) < _HEADER.size or not header.startswith(_MARK):
        raise ValueError("no member of a zip file begins here")
    name_bytes, extra_bytes = _HEADER.unpack(header[: _HEADER.size])[-2:]
    return int(_HEADER.size + name_bytes + extra_bytes)


def unpack_member(stored: bytes, method: int, size: int, crc: int) -> bytes:
    """The picture of a member. ValueError if it is not what the directory of the file says."""
    content = stored
    if method == DEFLATED:
        try:
            content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(stored, size + 1)  # one more: a longer one is seen
        except zlib.error as error:
            raise ValueError(str(error)) from error
    if len(content) != size or crc32_of(content) != crc:
        raise ValueError("its length or CRC-32 is not the one in the archive's directory")
    return content
