"""Tensors in safetensors files, as whole tensors or as slices that know their place in the whole.

Reading is the library's. Writing is ours for one reason: the checksum is summed while the bytes go out, so nothing
is copied, nothing is read twice, and the interpreter's lock is free meanwhile for the training loop.
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
from paceline.parallel.parts import is_sharded

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


@dataclass(frozen=True)
class Box:
    """Where a slice lies in its tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def slices(self, origin: tuple[int, ...]) -> tuple[slice, ...]:
        """This box as indices into a tensor whose first element lies at `origin`."""
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
    places = {}
    position = 0
    for name, piece in pieces.items():
        size = piece.values.nbytes
        header[name] = {
            "dtype": _TYPES[piece.values.dtype],
            "shape": list(piece.values.shape),
            "data_offsets": [position, position + size],
        }
        position += size
        if piece.box.shape != piece.whole_shape:
            places[name] = {"offset": piece.box.offset, "whole_shape": piece.whole_shape}
    header["__metadata__"] = {"format": "pt", "paceline_slices": json.dumps(places)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight
    written: SimpleQueue[memoryview | None] = SimpleQueue()
    with ThreadPoolExecutor(1, thread_name_prefix="checksums") as helper, path.open("w+b", buffering=0) as file:
        sums = helper.submit(_sum_and_read_back, file.fileno(), written)
        try:
            for view in _byte_views(len(text).to_bytes(8, "little") + text, pieces):
                for chunk in chunks_of(view):
                    _write_all(file.fileno(), chunk)
                    written.put(chunk)
        finally:
            written.put(None)
        os.fsync(file.fileno())
        checksum, read_back = sums.result()
        if read_back != checksum:
            raise OSError(errno.EIO, f"{path.name} reads back as something else than was written")
        return FileSeal(os.fstat(file.fileno()).st_size, checksum)


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
            yield piece.values.contiguous().view(-1).view(torch.uint8).numpy().data


def _write_all(descriptor: int, data: memoryview) -> None:
    """`os.write` may write less than it was given, near a full disk for one."""
    while data:
        data = data[os.write(descriptor, data) :]


def _boxes_of(file: Any, path: Path) -> dict[str, tuple[Box, tuple[int, ...]]]:
    """Where each tensor of a file lies in its whole, and how large that is."""
    boxes = {}
    try:
        places = json.loads((file.metadata() or {}).get("paceline_slices", "{}"))
        for key in file.keys():  # noqa: SIM118 - not a dictionary
            shape = tuple(file.get_slice(key).get_shape())
            place = places.get(key, {"offset": [0] * len(shape), "whole_shape": shape})
            box, whole = Box(tuple(map(int, place["offset"])), shape), tuple(map(int, place["whole_shape"]))
            if box.overlap(Box((0,) * len(whole), whole)) != box and 0 not in shape:
                raise ValueError(f"{key} lies outside of its whole")
            boxes[key] = (box, whole)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError("a checkpoint file cannot be read", where=str(path), got=str(error)[:80]) from error
    return boxes


class PayloadReader:
    """Any slice of any tensor out of the files of one kind (`model`, `optimizer` or `ema`)."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self._folder = folder
        self._found: dict[str, list[tuple[str, Box]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in files:
            with self._open(name) as file:
                for key, (box, whole_shape) in _boxes_of(file, folder / name).items():
                    self._found.setdefault(key, []).append((name, box))
                    self.shapes[key] = whole_shape
        self._require_all_slices()

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """The values of a box of a tensor; without a box, the whole tensor."""
        box = box or Box((0,) * len(self.shapes[key]), self.shapes[key])
        if box.shape == ():
            with self._open(self._found[key][0][0]) as file:
                scalar: Tensor = file.get_tensor(key)
            return scalar
        parts = [(name, piece, piece.overlap(box)) for name, piece in self._found[key]]
        result: Tensor | None = None
        covered = 0
        for name, piece, common in parts:
            # A rank may hold no row at all of a small tensor; it still needs the type.
            wanted = common or Box(piece.offset, (0,) * len(piece.shape))
            if common is None and result is not None:
                continue
            with self._open(name) as file:
                part = file.get_slice(key)[wanted.slices(piece.offset)]
            result = torch.empty(box.shape, dtype=part.dtype) if result is None else result
            if common is not None:
                result[common.slices(box.offset)] = part
                covered += part.numel()
        if result is None or covered != result.numel():
            raise self._missing(key)
        return result

    def _require_all_slices(self) -> None:
        """Also bounds what `read` will allocate: a shape is only believed with all of its values here."""
        for key, shape in self.shapes.items():
            if sum(math.prod(box.shape) for _, box in self._found[key]) != math.prod(shape):
                raise self._missing(key)

    def _missing(self, key: str) -> CheckpointError:
        return CheckpointError("a slice is missing from the checkpoint", where=str(self._folder), got=key)

    def _open(self, name: str) -> safe_open:
        try:
            return safe_open(self._folder / name, framework="pt")
        except (OSError, SafetensorError) as error:
            where = str(self._folder / name)
            raise CheckpointError("a checkpoint file cannot be read", where=where, got=str(error)) from error
