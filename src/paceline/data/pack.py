"""`paceline data pack`: decodes every picture once, and writes pixels or encoded pictures into a few large files.

Several processes decode (`pack_shards.py`), and memory use stays constant. A shard is written under a temporary name,
flushed, renamed and then listed in `packing.json`. A listed shard is complete. Packing again makes the missing shards,
and those whose pictures have changed. A packing that was killed and continued gives the same bits. Imports no torch.
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

from paceline.data.archives.places import has_archives
from paceline.data.decoders import in_processes
from paceline.data.encoded_pictures import digest_of_files
from paceline.data.pack_format import (
    FINISHED,
    UNFINISHED,
    Encoding,
    Packed,
    Shard,
    checksum,
    is_packed,
    picture_side,
    read_description,
    shard_layout,
    size_damage,
)
from paceline.data.pack_shards import EncodedFiles, Pixels, Stored
from paceline.data.packed_pictures import PackedPictures
from paceline.data.parts import PARTS
from paceline.data.picture_folder import Pictures, find_pictures
from paceline.data.pictures import DECODER
from paceline.errors import DataError, UserError

_LEAST_SHARD_BYTES = 64 * 2**20
_MOST_SHARDS = 256  # per part: each keeps a file open in every rank
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
    encoding: Encoding | None = None  # None: as pixels for `image_size`

    @property
    def side(self) -> int:
        """Of the stored squares; 0 for encoded pictures."""
        return picture_side(self.image_size) if self.encoding is None else 0


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

    file_bytes: int  # of the pictures, before they are packed
    root: Path

    def names(self, first: int, count: int) -> list[bytes]:
        """Of some pictures, relative to the root."""
        paths = self.paths[first : first + count]
        return [os.fsencode(path.relative_to(self.root).as_posix()) for path in paths]

    def is_made_by(self, shard: Shard | None) -> bool:
        return shard is not None and (shard.pictures, shard.source) == (len(self.paths), self.source)


def pack(request: PackRequest, progress: Progress) -> PackResult:
    """Bring the target up to date with the source."""
    _check_places(request)
    pictures = find_pictures(request.source)
    with _alone_in(request.target), _writing(request.target):
        before = _found(request)
        packed, plans = _plan(request, pictures, before)
        found = {shard.file: shard for shard in before.shards} if before else {}
        shards = {plan.file: found[plan.file] for plan in plans if plan.is_made_by(found.get(plan.file))}
        missing = [plan for plan in plans if plan.file not in shards]
        result = PackResult(replace(packed, shards=_in_order(shards)), len(missing), len(shards))
        if not missing and result.packed == before and (request.target / FINISHED).exists():
            return result
        _require_space(request, sum(_needed_bytes(plan, packed) for plan in missing), kept=set(shards))
        _describe(request.target, result.packed)
        (request.target / FINISHED).unlink(missing_ok=True)
        _remove_leftovers(request.target, kept=set(shards))
        progress.start(sum(len(plan.paths) for plan in plans), sum(shard.pictures for shard in shards.values()))
        for shard in _make_shards(request, missing, progress):
            shards[shard.file] = shard
            _describe(request.target, replace(packed, shards=_in_order(shards)))
        result = replace(result, packed=_with_contents(request.target, replace(packed, shards=_in_order(shards))))
        _describe(request.target, result.packed)
        _require_readable(result.packed, request)
        (request.target / UNFINISHED).replace(request.target / FINISHED)
        _flush_folder(request.target)
    return result


def _needed_bytes(plan: _ShardPlan, packed: Packed) -> int:
    return plan.file_bytes if packed.encoding is not None else len(plan.paths) * packed.picture_bytes


def _with_contents(target: Path, packed: Packed) -> Packed:
    """With the digests that a folder of the stored files would have."""
    if packed.encoding is None:
        return packed
    parts = packed.parts
    return replace(
        packed, contents={part: digest_of_files(PackedPictures(target, packed, part).files()) for part in parts}
    )


def _in_order(shards: dict[str, Shard]) -> tuple[Shard, ...]:
    """Sorted; they are made in any order."""
    return tuple(shard for part in PARTS for file, shard in sorted(shards.items()) if file.startswith(part))


def _check_places(request: PackRequest) -> None:
    source, target = request.source.resolve(), request.target.resolve()
    if has_archives(source):
        raise UserError(
            "archives are not packed",
            got=str(request.source),
            hint="train on them directly, or unpack them into a folder first",
        )
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
    if packed.encoding != request.encoding:
        raise UserError(
            "this folder holds pictures packed in another way",
            where=str(request.target),
            got=packed.describe_pictures(),
            allowed=replace(packed, encoding=request.encoding, side=request.side).describe_pictures(),
            hint="use another folder, or the flags of the first packing",
        )
    if packed.side != request.side:
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
    sizes = {name: [_stat(path) for path in part.paths] for name, part in pictures}
    if request.encoding is None:
        picture_bytes = 3 * request.side * request.side
    else:
        total = sum(found.st_size for part in sizes.values() for found in part)
        picture_bytes = max(1, total // sum(map(len, sizes.values())))
    most = max(len(part.paths) for _, part in pictures)
    shard_bytes = request.shard_bytes or max(_LEAST_SHARD_BYTES, -(-most * picture_bytes // _MOST_SHARDS))
    per_shard = max(1, shard_bytes // picture_bytes)
    if before is not None and request.shard_bytes is None:
        per_shard = before.pictures_per_shard  # keep it: a few new pictures then do not move all the others
    per_class = {name: tuple(part.per_class) for name, part in pictures}
    contents = before.contents if before is not None else {}
    packed = Packed(pictures.classes, per_class, request.side, per_shard, (), DECODER, request.encoding, contents)
    plans = []
    for name, part in pictures:
        start = 0
        for file, size in shard_layout(name, len(part.paths), per_shard, packed.suffix):
            paths, found = part.paths[start : start + size], sizes[name][start : start + size]
            source, file_bytes = _identity(paths, found, request), sum(status.st_size for status in found)
            plans.append(_ShardPlan(file, paths, source, file_bytes, pictures.root))
            start += size
    return packed, plans


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError("this picture cannot be read", where=str(path), got=error.strerror) from error


def _identity(paths: list[Path], found: list[os.stat_result], request: PackRequest) -> str:
    """Changes when the name, size or modification time of a picture changes, and with the rules of decoding."""
    digest = hashlib.sha256(f"decoder {DECODER}\n".encode())
    if request.encoding is not None:
        digest.update(f"{request.encoding}\n".encode())
    for path, status in zip(paths, found, strict=True):
        name = path.relative_to(request.source).as_posix()
        digest.update(os.fsencode(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"))  # a name may not be UTF-8
    return digest.hexdigest()[:16]


@contextmanager
def _alone_in(target: Path) -> Iterator[None]:
    try:
        target.mkdir(parents=True, exist_ok=True)
        lock = (target / ".pack.lock").open("ab")
    except OSError as error:
        raise UserError("this folder cannot be written", where=str(target), got=error.strerror) from error
    with lock as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError("another process is packing into this folder", where=str(target)) from error
        yield


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            "the packed pictures cannot be written",
            where=str(target),
            got=error.strerror,
            hint="the same command continues where it stopped",
        ) from error


def _leftovers(target: Path, kept: set[str]) -> list[Path]:
    """Partial shards of a killed packing, and shards that do not belong to the set or no longer fit it."""
    parts = [path for path in target.glob(".*.part") if path.is_file()]
    shards = [*target.glob("*.u8"), *target.glob("*.enc")]
    return parts + [path for path in shards if path.name not in kept]


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


def _make_shards(request: PackRequest, plans: list[_ShardPlan], progress: Progress) -> Iterator[Shard]:
    """Decode with all processes. Yield each shard after its rename."""
    stored: Stored = Pixels(request.side) if request.encoding is None else EncodedFiles(request.encoding)
    unreadable: list[str] = []
    for (plan, first), result in in_processes(stored.work, _chunks(request, plans, stored), request.workers):
        part, names = _part(request.target, plan), plan.names(first, stored.chunk_size)
        unreadable += [os.fsdecode(names[number]) for number in stored.take(part, names, result)]
        progress.advance(len(names))
        if first + len(names) == len(plan.paths):
            shard = Shard(plan.file, len(plan.paths), "", plan.source, tuple(unreadable), *stored.finish(part))
            yield _commit(request.target, part, shard)
            unreadable = []


def _chunks(
    request: PackRequest, plans: list[_ShardPlan], stored: Stored
) -> Iterator[tuple[tuple[_ShardPlan, int], tuple[Any, ...]]]:
    """The tasks of the processes: some pictures of a shard. Creates the file of the shard first."""
    for plan in plans:
        part = _part(request.target, plan)
        stored.create(part, len(plan.paths))
        for first in range(0, len(plan.paths), stored.chunk_size):
            paths = [str(path) for path in plan.paths[first : first + stored.chunk_size]]
            yield (plan, first), stored.arguments(part, first, paths)


def _part(target: Path, plan: _ShardPlan) -> Path:
    # The name holds the process id: decoders of a killed packing may still write for a moment.
    return target / f".{plan.file}.{os.getpid()}.part"


def _commit(target: Path, part: Path, shard: Shard) -> Shard:
    """Flush a complete shard and rename it."""
    crc32 = checksum(part)
    handle = os.open(part, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    part.replace(target / shard.file)
    _flush_folder(target)
    return replace(shard, crc32=crc32)
