"""`paceline data pack`: decodes and resizes every picture once, into shards that training maps into memory.

Several processes decode. Each writes its pictures directly into the shard file, so no pixels are sent between
processes and memory use stays constant. A shard is written under a temporary name, flushed, renamed and then listed in
`packing.json`. A listed shard is complete. Packing again makes the missing shards, and those whose pictures have
changed. A packing that was killed and continued gives the same bits. Imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.data.decoders import in_processes
from paceline.data.pack_format import (
    FINISHED,
    UNFINISHED,
    Packed,
    Shard,
    checksum,
    is_packed,
    picture_side,
    read_description,
    shard_layout,
    size_damage,
)
from paceline.data.parts import PARTS
from paceline.data.picture_folder import Pictures, find_pictures
from paceline.data.pictures import DECODER, GREY, read_pixels
from paceline.errors import DataError, UserError

_LEAST_SHARD_BYTES = 64 * 2**20
_MOST_SHARDS = 256  # per part: each keeps a file open in every rank
_CHUNK_BYTES = 8 * 2**20  # in memory of one process at a time
_CHUNK_PICTURES = 16  # small, so the progress bar moves often
_SPARE_BYTES = 16 * 2**20
_MOST_NAMES = 6


class Progress(Protocol):
    """Receives the progress of a long job."""

    def start(self, total: int, done: int) -> None: ...

    def advance(self, by: int) -> None: ...


@dataclass(frozen=True)
class PackRequest:
    source: Path
    target: Path
    image_size: int = 224
    workers: int = 1
    unreadable: int = 0
    shard_bytes: int | None = None  # None: chosen from the size of the set


@dataclass(frozen=True)
class PackResult:
    packed: Packed
    made: int  # shards that this packing wrote
    kept: int  # shards that existed already


@dataclass(frozen=True)
class _ShardPlan:
    """A shard that the packing has to make."""

    file: str
    paths: list[Path]
    source: str

    def is_made_by(self, shard: Shard | None) -> bool:
        return shard is not None and (shard.pictures, shard.source) == (len(self.paths), self.source)


def pack(request: PackRequest, progress: Progress) -> PackResult:
    """Bring the target up to date with the source."""
    _check_places(request)
    pictures = find_pictures(request.source)
    request.target.mkdir(parents=True, exist_ok=True)
    with _alone_in(request.target):
        before = _found(request)
        packed, plans = _plan(request, pictures, before)
        found = {shard.file: shard for shard in before.shards} if before else {}
        shards = {plan.file: found[plan.file] for plan in plans if plan.is_made_by(found.get(plan.file))}
        missing = [plan for plan in plans if plan.file not in shards]
        result = PackResult(replace(packed, shards=_in_order(shards)), len(missing), len(shards))
        if not missing and result.packed == before and (request.target / FINISHED).exists():
            return result
        _require_space(request, sum(len(plan.paths) for plan in missing) * packed.picture_bytes, kept=set(shards))
        _describe(request.target, result.packed)
        (request.target / FINISHED).unlink(missing_ok=True)
        _remove_leftovers(request.target, kept=set(shards))
        progress.start(sum(len(plan.paths) for plan in plans), sum(shard.pictures for shard in shards.values()))
        for shard in _make_shards(request, packed.side, missing, progress):
            shards[shard.file] = shard
            _describe(request.target, replace(packed, shards=_in_order(shards)))
        result = replace(result, packed=replace(packed, shards=_in_order(shards)))
        _require_readable(result.packed, request)
        (request.target / UNFINISHED).replace(request.target / FINISHED)
        _flush_folder(request.target)
    return result


def _in_order(shards: dict[str, Shard]) -> tuple[Shard, ...]:
    """Sorted; they are made in any order."""
    return tuple(shard for part in PARTS for file, shard in sorted(shards.items()) if file.startswith(part))


def _check_places(request: PackRequest) -> None:
    source, target = request.source.resolve(), request.target.resolve()
    if not source.is_dir():
        raise UserError("there is no such folder of pictures", got=str(request.source.absolute()))
    if is_packed(source):
        raise UserError("this folder is packed already", got=str(request.source))
    if source == target or source in target.parents or target in source.parents:
        raise UserError(
            "pictures and packed pictures need separate folders",
            got=f"{request.source} and {request.target}, one inside the other",
            hint=f"paceline data pack {request.source} {source}-packed",
        )
    if target.exists() and not target.is_dir():
        raise UserError("this is a file, but a folder is needed", got=str(request.target))
    if target.is_dir() and not is_packed(target) and any(not e.name.startswith(".") for e in target.iterdir()):
        raise UserError(
            "this folder holds something else", where=str(request.target), allowed="a new folder, or a packed one"
        )


def _found(request: PackRequest) -> Packed | None:
    """An earlier packing, with the shards that still exist. UserError for a finished one of another size."""
    path = next((p for p in (request.target / FINISHED, request.target / UNFINISHED) if p.exists()), None)
    if path is None:
        return None
    packed = read_description(path)
    if packed.side != picture_side(request.image_size):
        raise UserError(
            "this folder holds pictures packed at another size",
            where=str(request.target),
            got=f"{packed.side} x {packed.side} pixels; --image-size {request.image_size} "
            f"makes {picture_side(request.image_size)} x {picture_side(request.image_size)}",
            hint=f"--image-size {round(packed.side * 224 / 256)} to continue it, or use another folder",
        )
    whole = tuple(shard for shard in packed.shards if size_damage(request.target, packed, shard) is None)
    return replace(packed, shards=whole)


def _plan(request: PackRequest, pictures: Pictures, before: Packed | None) -> tuple[Packed, list[_ShardPlan]]:
    """The packed set without shards, and the plans of its shards."""
    side = picture_side(request.image_size)
    picture_bytes = 3 * side * side
    most = max(len(part.paths) for _, part in pictures)
    shard_bytes = request.shard_bytes or max(_LEAST_SHARD_BYTES, -(-most * picture_bytes // _MOST_SHARDS))
    per_shard = max(1, shard_bytes // picture_bytes)
    if before is not None and request.shard_bytes is None:
        per_shard = before.pictures_per_shard  # keep it: a few new pictures then do not move all the others
    per_class = {name: tuple(part.per_class) for name, part in pictures}
    plans = []
    for name, part in pictures:
        start = 0
        for file, size in shard_layout(name, len(part.paths), per_shard):
            paths = part.paths[start : start + size]
            plans.append(_ShardPlan(file, paths, _identity(paths, pictures.root)))
            start += size
    return Packed(pictures.classes, per_class, side, per_shard, (), DECODER), plans


def _identity(paths: list[Path], root: Path) -> str:
    """Changes when the name, size or modification time of a picture changes, and with the rules of decoding."""
    digest = hashlib.sha256(f"decoder {DECODER}\n".encode())
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            raise DataError("this picture cannot be read", where=str(path), got=error.strerror) from error
        name = path.relative_to(root).as_posix()
        digest.update(os.fsencode(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\n"))  # a name may not be UTF-8
    return digest.hexdigest()[:16]


@contextmanager
def _alone_in(target: Path) -> Iterator[None]:
    with (target / ".pack.lock").open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError("another process is packing into this folder", where=str(target)) from error
        yield


def _leftovers(target: Path, kept: set[str]) -> list[Path]:
    """Partial shards of a killed packing, and shards that do not belong to the set or no longer fit it."""
    parts = [path for path in target.glob(".*.part") if path.is_file()]
    return parts + [path for path in target.glob("*.u8") if path.name not in kept]


def _remove_leftovers(target: Path, kept: set[str]) -> None:
    # A run that reads one of them now keeps its mapping.
    for path in _leftovers(target, kept):
        path.unlink()


def _require_space(request: PackRequest, wanted_bytes: int, kept: set[str]) -> None:
    free_bytes = shutil.disk_usage(request.target).free
    free_bytes += sum(path.stat().st_size for path in _leftovers(request.target, kept))
    if wanted_bytes + _SPARE_BYTES > free_bytes:
        raise UserError(
            "there is not enough disk space for the packed pictures",
            where=str(request.target),
            got=f"{free_bytes / 1e9:,.2f} GB free, {wanted_bytes / 1e9:,.2f} GB needed",
            hint="another disk, or a smaller --image-size",
        )


def _describe(target: Path, packed: Packed) -> None:
    """Replace `packing.json`. It is flushed to disk when this returns."""
    part = target / f".{UNFINISHED}.part"
    with part.open("w", encoding="utf-8") as file:
        file.write(packed.to_text())
        file.flush()
        os.fsync(file.fileno())
    part.replace(target / UNFINISHED)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _require_readable(packed: Packed, request: PackRequest) -> None:
    bad = packed.unreadable
    if len(bad) > request.unreadable:
        names = bad[:_MOST_NAMES] + ([f"and {len(bad) - _MOST_NAMES} more"] if len(bad) > _MOST_NAMES else [])
        raise DataError(
            f"{len(bad)} picture{'s' if len(bad) > 1 else ''} cannot be read",
            where=str(request.source),
            got="\n".join(names),
            allowed=f"--unreadable {request.unreadable}",
            hint=f"replace or remove them, or replace them by grey: --unreadable {len(bad)}\n"
            "the same command then makes only what is missing",
        )


def _make_shards(request: PackRequest, side: int, plans: list[_ShardPlan], progress: Progress) -> Iterator[Shard]:
    """Decode with all processes, several shards at a time. Yield each shard after its rename."""
    size = max(1, min(_CHUNK_PICTURES, _CHUNK_BYTES // (3 * side * side)))
    unreadable: list[str] = []
    try:
        for (plan, first), bad in in_processes(_decode, _chunks(request, side, plans, size), request.workers):
            paths = plan.paths[first : first + size]
            unreadable += [paths[number].relative_to(request.source).as_posix() for number in bad]
            progress.advance(len(paths))
            if first + size >= len(plan.paths):
                yield _commit(request.target, plan, tuple(unreadable))
                unreadable = []
    except OSError as error:
        raise DataError(
            "the packed pictures cannot be written",
            where=str(request.target),
            got=error.strerror,
            hint="the same command continues where it stopped",
        ) from error


def _chunks(
    request: PackRequest, side: int, plans: list[_ShardPlan], size: int
) -> Iterator[tuple[tuple[_ShardPlan, int], tuple[Any, ...]]]:
    """The tasks of the processes: some pictures and their place in a shard. Creates the file of the shard first."""
    for plan in plans:
        part = _part(request.target, plan)
        with part.open("wb") as file:
            file.truncate(3 * side * side * len(plan.paths))
        for first in range(0, len(plan.paths), size):
            names = [str(path) for path in plan.paths[first : first + size]]
            yield (plan, first), (str(part), first, names, side)


def _part(target: Path, plan: _ShardPlan) -> Path:
    # The name holds the process id: decoders of a killed packing may still write for a moment.
    return target / f".{plan.file}.{os.getpid()}.part"


def _commit(target: Path, plan: _ShardPlan, unreadable: tuple[str, ...]) -> Shard:
    """Flush a complete shard and rename it."""
    part = _part(target, plan)
    crc32 = checksum(part)
    handle = os.open(part, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    part.replace(target / plan.file)
    _flush_folder(target)
    return Shard(plan.file, len(plan.paths), crc32, plan.source, unreadable)


def _decode(part: str, first: int, names: list[str], side: int) -> list[int]:
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
