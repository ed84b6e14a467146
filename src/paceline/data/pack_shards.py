"""What a packing stores in a shard: pixels, or encoded pictures. Imports no torch.

Pixels have fixed places, so each process writes its own. Encoded pictures are sent to the parent, which appends them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from paceline.data.pack_format import Encoding
from paceline.data.packed_pictures import ENTRY
from paceline.data.picture_files import read_picture_file
from paceline.data.pictures import GREY, as_rgb, look_at_picture, opened, read_pixels
from paceline.errors import DataError

_CHUNK_BYTES = 8 * 2**20  # in memory of one process at a time
_CHUNK_PICTURES = 16  # small, so the progress bar moves often
_GREY_SIDE = 8


class Stored(Protocol):
    """How the pictures of a shard are stored. `part` is the file of a shard that is not complete yet."""

    chunk_size: int  # pictures of one task
    work: Callable[..., Any]  # runs in a process, with `arguments`

    def create(self, part: Path, num_pictures: int) -> None: ...

    def arguments(self, part: Path, first: int, paths: list[str]) -> tuple[Any, ...]: ...

    def take(self, part: Path, names: list[bytes], result: Any) -> list[int]:
        """Take what `work` returned. Returns the numbers of the pictures that cannot be read."""
        ...

    def finish(self, part: Path) -> tuple[int, ...]:
        """Complete the shard. Returns the bytes of the pictures and of their names; nothing for pixels."""
        ...


class Pixels:
    """uint8 [pictures, 3, side, side]."""

    def __init__(self, side: int) -> None:
        self._side = side
        self._picture_bytes = 3 * side * side
        self.chunk_size = max(1, min(_CHUNK_PICTURES, _CHUNK_BYTES // self._picture_bytes))
        self.work: Callable[..., Any] = decode_into

    def create(self, part: Path, num_pictures: int) -> None:
        with part.open("wb") as file:
            file.truncate(num_pictures * self._picture_bytes)

    def arguments(self, part: Path, first: int, paths: list[str]) -> tuple[Any, ...]:
        return str(part), first, paths, self._side

    def take(self, part: Path, names: list[bytes], result: list[int]) -> list[int]:
        return result

    def finish(self, part: Path) -> tuple[int, ...]:
        return ()


def decode_into(part: str, first: int, names: list[str], side: int) -> list[int]:
    """Write pictures into their places in a shard. Return the numbers of those that cannot be read."""
    pixels = np.empty((len(names), 3, side, side), dtype=np.uint8)
    unreadable = []
    for number, name in enumerate(names):
        try:
            pixels[number] = read_pixels(Path(name), side)
        except DataError:
            pixels[number] = GREY
            unreadable.append(number)
    handle = os.open(part, os.O_WRONLY)
    try:
        rest, offset = pixels.reshape(-1).data, first * 3 * side * side
        while rest:
            written = os.pwrite(handle, rest, offset)
            rest, offset = rest[written:], offset + written
    finally:
        os.close(handle)
    return unreadable


@dataclass(frozen=True)
class EncodedPicture:
    content: bytes
    width: int  # the right way up
    height: int
    is_readable: bool = True


class EncodedFiles:
    """The pictures as they are, or smaller. Their index and names follow at the end of the shard."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._index = _Index()
        self.chunk_size = _CHUNK_PICTURES
        self.work: Callable[..., Any] = encode_pictures

    def create(self, part: Path, num_pictures: int) -> None:
        part.write_bytes(b"")

    def arguments(self, part: Path, first: int, paths: list[str]) -> tuple[Any, ...]:
        return paths, self._encoding

    def take(self, part: Path, names: list[bytes], result: list[EncodedPicture]) -> list[int]:
        with part.open("ab") as file:
            file.writelines(picture.content for picture in result)
        for name, picture in zip(names, result, strict=True):
            self._index.add(name, picture)
        return [number for number, picture in enumerate(result) if not picture.is_readable]

    def finish(self, part: Path) -> tuple[int, ...]:
        index, self._index = self._index, _Index()
        with part.open("ab") as file:
            file.write(np.array(index.entries, ENTRY).tobytes())
            file.write(index.names)
        return index.end, len(index.names)


@dataclass
class _Index:
    entries: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    names: bytearray = field(default_factory=bytearray)
    end: int = 0

    def add(self, name: bytes, picture: EncodedPicture) -> None:
        self.names += name
        self.entries.append((self.end, len(picture.content), picture.width, picture.height, len(self.names)))
        self.end += len(picture.content)


def encode_pictures(names: list[str], encoding: Encoding) -> list[EncodedPicture]:
    """Decode pictures, so that training meets none that cannot be read. Larger ones are made smaller."""
    return [_encode(Path(name), encoding) for name in names]


def _encode(path: Path, encoding: Encoding) -> EncodedPicture:
    try:
        content = read_picture_file(path)
        seen = look_at_picture(content)
        if not encoding.max_side or max(seen.width, seen.height) <= encoding.max_side:
            return EncodedPicture(content, seen.width, seen.height)
        with opened(content) as image:
            small = as_rgb(image)
            small.thumbnail((encoding.max_side, encoding.max_side), Image.Resampling.LANCZOS, reducing_gap=None)
    except DataError:
        grey = Image.new("RGB", (_GREY_SIDE, _GREY_SIDE), (GREY, GREY, GREY))
        return EncodedPicture(_as_jpeg(grey, 100), *grey.size, is_readable=False)
    return EncodedPicture(_as_jpeg(small, encoding.quality), *small.size)


def _as_jpeg(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()
