"""Tensors in safetensors files, as whole tensors or as slices that know their place in the whole.

The safetensors library reads files. Writing is our own code: it computes the checksum while the bytes are written. So
nothing is copied or read twice, and Python's lock is free for the training loop. Slices are checked
when they are read: they must fill their tensor without gap or overlap, because a gap would be uninitialised memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoints.format import CHUNK_BYTES, FileSeal, add_checksum, chunks_of
from paceline.errors import CheckpointError
from paceline.parallel.parts import bits, copy_bits, is_sharded, new_tensor
from paceline.runs.patience import read_patiently
from paceline.settings.small_files import open_plain, parse_json, write_all

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# All other types are stored as bytes, with one more dimension; the header names the type.
_KNOWN = (getattr(torch, name) for name in dir(torch) if not name.startswith("q"))
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _KNOWN if isinstance(dtype, torch.dtype)}
_NAMES = {name: dtype for dtype, name in _TYPES.items()}
_BYTES = "U8"
_LARGEST_DIMENSION = 2**48
# A grid over any number of dimensions needs one cut per dimension; our own slices need one.
_MOST_CUTS = 8


@dataclass(frozen=True)
class Piece:
    """A tensor, or this rank's slice of one, in CPU memory."""

    values: Tensor
    box: Box
    whole_shape: tuple[int, ...]


def local_box(tensor: Tensor) -> Box:
    """The part of a tensor this rank holds."""
    if is_sharded(tensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
        return Box(tuple(offset), tuple(shape))
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def write_pieces(path: Path, pieces: dict[str, Piece]) -> FileSeal:
    """Write a safetensors file, flush it to disk, read it back and return its seal."""
    header: dict[str, object] = {}
    places, types = {}, {}
    position = 0
    for name, piece in pieces.items():
        size, dtype, shape = piece.values.nbytes, piece.values.dtype, list(piece.values.shape)
        if dtype not in _TYPES:
            types[name] = str(dtype).removeprefix("torch.")
            shape.append(piece.values.element_size())
        header[name] = {
            "dtype": _TYPES.get(dtype, _BYTES),
            "shape": shape,
            "data_offsets": [position, position + size],
        }
        position += size
        if piece.box.shape != piece.whole_shape:
            places[name] = {"offset": piece.box.offset, "whole_shape": piece.whole_shape}
    metadata = {"format": "pt", "paceline_slices": json.dumps(places)}
    header["__metadata__"] = {**metadata, "paceline_types": json.dumps(types)} if types else metadata
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight
    written: SimpleQueue[memoryview | None] = SimpleQueue()
    file = open_plain(path, os.O_RDWR | os.O_TRUNC)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="checksums") as helper:
            sums = helper.submit(_sum_and_read_back, file, written)
            try:
                for view in _byte_views(len(text).to_bytes(8, "little") + text, pieces):
                    for chunk in chunks_of(view):
                        write_all(file, chunk)
                        written.put(chunk)
            finally:
                written.put(None)
            os.fsync(file)
            checksum, read_back = sums.result()
        if read_back != checksum:
            raise OSError(errno.EIO, f"{path.name} reads back as something else than was written")
        return FileSeal(os.fstat(file).st_size, checksum)
    finally:
        os.close(file)


def _sum_and_read_back(descriptor: int, written: SimpleQueue[memoryview | None]) -> tuple[int, int]:
    """Checksums of what was written and of what reads back, made beside the writer and close behind it."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    checksum, read_back, position = 0, 0, 0
    while (chunk := written.get()) is not None:
        checksum = add_checksum(chunk, checksum)
        count = os.preadv(descriptor, [buffer[: len(chunk)]], position)
        read_back = add_checksum(buffer[:count], read_back)
        position += len(chunk)
    return checksum, read_back


def _byte_views(head: bytes, pieces: dict[str, Piece]) -> Iterator[memoryview]:
    yield memoryview(head)
    for piece in pieces.values():
        if piece.values.numel():
            yield bits(piece.values).contiguous().view(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class _Stored:
    """A slice in a file."""

    file: str
    box: Box
    dtype: torch.dtype
    is_bytes: bool  # one more dimension, the bytes of an element


def _read_header(file: Any, path: Path) -> dict[str, tuple[_Stored, tuple[int, ...]]]:
    """For each tensor of a file: its type, its box in the complete tensor, and the shape of that tensor."""
    found = {}
    try:
        metadata = file.metadata() or {}
        places, types = (parse_json(metadata.get(f"paceline_{name}", "{}")) for name in ("slices", "types"))
        for key in file.keys():  # noqa: SIM118 - not a dictionary
            stored = file.get_slice(key)
            shape, is_bytes = tuple(stored.get_shape()), key in types
            dtype = DTYPES[types[key]] if is_bytes else _NAMES[stored.get_dtype()]
            if is_bytes and (stored.get_dtype() != _BYTES or shape[-1:] != (dtype.itemsize,)):
                raise ValueError(f"{key} does not hold values of {types[key]}")
            shape = shape[:-1] if is_bytes else shape
            place = places.get(key, {"offset": [0] * len(shape), "whole_shape": shape})
            box, whole = Box(tuple(map(int, place["offset"])), shape), tuple(map(int, place["whole_shape"]))
            if not box.lies_in(whole) or any(size >= _LARGEST_DIMENSION for size in whole):
                raise ValueError(f"{key} is outside of its tensor")
            found[key] = (_Stored(path.name, box, dtype, is_bytes), whole)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError("a checkpoint file cannot be read", where=str(path), got=str(error)[:80]) from error
    return found


class PayloadReader:
    """Any slice of any tensor out of the files of one kind (`model`, `optimizer` or `ema`)."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self._folder = folder
        self._found: dict[str, list[_Stored]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name in files:
            with self._open(name) as file:
                for key, (stored, whole_shape) in _read_header(file, folder / name).items():
                    self._found.setdefault(key, []).append(stored)
                    same = self.shapes.setdefault(key, whole_shape), self.dtypes.setdefault(key, stored.dtype)
                    if same != (whole_shape, stored.dtype):
                        raise self._wrong("the slices of a tensor do not agree on its shape and type", key)
        for key, shape in self.shapes.items():
            # Also bounds what `read` will allocate: a shape is only believed with all of its values here.
            if not fill_whole([stored.box for stored in self._found[key]], shape):
                raise self._wrong("a slice is missing from the checkpoint, or two overlap", key)

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """The values of a box of a tensor; without a box, the whole tensor."""
        box = box or Box((0,) * len(self.shapes[key]), self.shapes[key])
        result = new_tensor(box.shape, self.dtypes[key])
        covered = 0
        for stored in self._found[key]:
            common = stored.box.overlap(box)
            if common is not None:
                copy_bits(result[common.slices(box.offset)], self._read_part(key, stored, common))
                covered += math.prod(common.shape)
        if covered != result.numel():  # the box reaches beyond the tensor
            raise self._wrong("a slice is missing from the checkpoint, or two overlap", key)
        return result

    def _read_part(self, key: str, stored: _Stored, box: Box) -> Tensor:
        with self._open(stored.file) as file:
            if not stored.is_bytes:
                part: Tensor = file.get_slice(key)[box.slices(stored.box.offset)] if box.shape else file.get_tensor(key)
                return part
            raw = file.get_slice(key)[(*box.slices(stored.box.offset), slice(None))]
        return raw.clone().view(stored.dtype).squeeze(-1)  # type: ignore[no-any-return]

    def _wrong(self, what: str, key: str) -> CheckpointError:
        return CheckpointError(what, where=str(self._folder), got=key)

    def _open(self, name: str) -> safe_open:
        path = self._folder / name
        try:
            read_patiently(f"reading {name}", path, lambda: os.close(os.open(path, os.O_RDONLY)))
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError("a checkpoint file cannot be read", where=str(path), got=str(error)) from error


@dataclass(frozen=True)
class Box:
    """The place of a slice in its tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """This box as indices into a tensor whose first element is at `origin`."""
        return tuple(
            slice(start - zero, start - zero + size)
            for start, zero, size in zip(self.offset, origin, self.shape, strict=True)
        )

    def overlap(self, other: Box) -> Box | None:
        offset = tuple(map(max, self.offset, other.offset))
        ends = [
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def lies_in(self, whole: tuple[int, ...]) -> bool:
        return all(
            start >= 0 and size >= 0 and start + size <= end
            for start, size, end in zip(self.offset, self.shape, whole, strict=True)
        )


def fill_whole(boxes: list[Box], whole: tuple[int, ...]) -> bool:
    """Whether these boxes, each inside the whole, cover every element of it exactly once.

    Disjoint boxes of the right volume do. Straight cuts through all of them, dimension by dimension, separate them
    in about n log n steps. Arrangements without such cuts are refused, because no strategy writes them.
    """
    filled = [box for box in boxes if 0 not in box.shape]
    if sum(math.prod(box.shape) for box in filled) != math.prod(whole):
        return False
    groups = [filled] if len(filled) > 1 else []
    for cut in range(_MOST_CUTS * max(len(whole), 1)):
        if not groups:
            return True
        if not whole:
            return False  # two values for a scalar
        parts = [part for group in groups for part in _cut(group, cut % len(whole))]
        groups = [part for part in parts if len(part) > 1]
    return not groups


def _cut(boxes: list[Box], dimension: int) -> Iterator[list[Box]]:
    """Groups of boxes that a plane across this dimension separates, in order."""
    group: list[Box] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.offset[dimension]):
        if group and box.offset[dimension] >= end:
            yield group
            group = []
        group.append(box)
        end = max(end, box.offset[dimension] + box.shape[dimension])
    yield group
