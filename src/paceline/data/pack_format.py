"""The format of a packed data set, and the check that it is complete. Imports no torch: a check must start fast.

Pictures are packed as pixels:

    PACKED/
      packed.json      classes, side, number of the decoder's rules, and per shard its pictures, size and CRC-32;
                       ends in its own checksum
      train-00000.u8   pictures one after the other, nothing between them: uint8 [pictures, 3, side, side]
      train-00001.u8   ...
      test-00000.u8    ..., and validation-00000.u8 if the pictures have a validation folder

or as they are encoded (JPEG, PNG, ...), with train-00000.enc and so on instead (`packed_pictures.py`).

All shards of a part except the last hold the same number of pictures, so a sample's number gives its place. Pictures
are sorted by class, so the class sizes give the labels. `packing.json` has the same format and exists during the
packing: it lists the shards that are done.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.data.parts import PARTS, TEST, TRAIN
from paceline.errors import DataError, UserError
from paceline.runs.json_files import COUNT, Fields, ListOf, MapOf, Number, fit
from paceline.settings.small_files import parse_json, read_small
from paceline.settings.text import find_fault

try:
    from isal import isal_zlib as _checksums  # the same checksums as zlib, several times as fast
except ImportError:  # pragma: no cover
    import zlib as _checksums  # type: ignore[no-redef]

VERSION = 2  # of the format for pixels; format 1 has no validation part, and only decoder 1
ENCODED_VERSION = 3  # for encoded pictures
FINISHED, UNFINISHED = "packed.json", "packing.json"
_SHARD_NAME = re.compile(rf"({'|'.join(PARTS)})-[0-9]{{5}}\.(u8|enc)")
_LARGEST_JSON_BYTES = 64 * 2**20
_CHUNK_BYTES = 4 * 2**20
_MOST_PICTURES = 10**10
ENTRY_BYTES = 24  # of a picture in the index of a shard
_SHARD = {"file": str, "pictures": COUNT, "crc32": str, "source": str, "unreadable": ListOf(str)}
_ENCODED_SHARD = {"pictures_bytes": COUNT, "names_bytes": COUNT}
_BOTH = {
    "classes": ListOf(str),
    "per_class": MapOf(ListOf(COUNT)),
    "pictures_per_shard": Number(1, _MOST_PICTURES, is_whole=True),
    "decoder": COUNT,
}
_SHAPE = Fields(
    required={**_BOTH, "side": Number(1, 10**6, is_whole=True), "shards": ListOf(Fields(required=_SHARD))},
)
_ENCODED_SHAPE = Fields(
    required={
        **_BOTH,
        "shards": ListOf(Fields(required={**_SHARD, **_ENCODED_SHARD})),
        "encoding": Fields(required={"max_side": COUNT, "quality": COUNT}),
        "contents": MapOf(str),
    }
)


@dataclass(frozen=True)
class Shard:
    """One file of pixels."""

    file: str
    pictures: int
    crc32: str
    source: str  # hash of the names, sizes and times of its pictures
    unreadable: tuple[str, ...] = ()  # replaced by grey
    pictures_bytes: int = 0  # these two: of encoded pictures and of their names
    names_bytes: int = 0


@dataclass(frozen=True)
class Encoding:
    """How pictures are stored if not as pixels."""

    max_side: int = 0  # larger pictures are scaled to this longer side and encoded as JPEG; 0: all as they are
    quality: int = 90  # of that JPEG


@dataclass(frozen=True)
class Packed:
    """The description of a packed data set."""

    classes: tuple[str, ...]
    per_class: dict[str, tuple[int, ...]]  # for each part, the number of pictures of each class
    side: int  # 0 for encoded pictures
    pictures_per_shard: int
    shards: tuple[Shard, ...]
    decoder: int  # the number of the rules that made the pixels or read the pictures (`data/pictures.py`)
    encoding: Encoding | None = None  # None: pixels
    contents: dict[str, str] = field(default_factory=dict)  # for each part, a digest of the names and sizes of files

    @property
    def parts(self) -> list[str]:
        return [part for part in PARTS if part in self.per_class]

    @property
    def picture_bytes(self) -> int:
        return 3 * self.side * self.side

    @property
    def suffix(self) -> str:
        return "u8" if self.encoding is None else "enc"

    def bytes_of(self, shard: Shard) -> int:
        """The size of its file."""
        return shard.pictures * self.picture_bytes if self.encoding is None else encoded_bytes(shard)

    def describe_pictures(self) -> str:
        if self.encoding is None:
            return f"{self.side} x {self.side} pixels"
        most = f", at most {self.encoding.max_side} pixels a side" if self.encoding.max_side else ""
        return f"encoded{most}"

    def num_pictures(self, part: str) -> int:
        return sum(self.per_class[part])

    def shards_of(self, part: str) -> list[Shard]:
        return [shard for shard in self.shards if shard.file.startswith(f"{part}-")]

    @property
    def unreadable(self) -> list[str]:
        return [name for shard in self.shards for name in shard.unreadable]

    @property
    def size_bytes(self) -> int:
        return sum(map(self.bytes_of, self.shards))

    def to_text(self) -> str:
        """JSON with its own checksum. The same pictures give the same text."""
        values = asdict(self)
        if self.encoding is None:
            body = {"paceline_packed": VERSION, "pixels": "uint8 [pictures, 3, side, side], central square, bilinear"}
            unused = {"encoding", "contents"}
            for shard in values["shards"]:
                del shard["pictures_bytes"], shard["names_bytes"]
        else:
            body = {"paceline_packed": ENCODED_VERSION, "pictures": "encoded, then an index, then names"}
            unused = {"side"}
        body |= {name: value for name, value in values.items() if name not in unused}
        return json.dumps({**body, "crc32": _seal(body)}, indent=1) + "\n"


def encoded_bytes(shard: Shard) -> int:
    """The size of a shard of encoded pictures."""
    return shard.pictures_bytes + shard.pictures * ENTRY_BYTES + shard.names_bytes


def picture_side(image_size: int) -> int:
    """The side of stored pictures: a little more than the model sees, to leave room for crops."""
    return round(image_size * 256 / 224)


def is_packed(folder: Path) -> bool:
    """True also for an unfinished packing: its files are not class folders."""
    return (folder / FINISHED).exists() or (folder / UNFINISHED).exists()


def holds_pixels(folder: Path) -> bool:
    """Whether a folder is packed as pixels, so that training decodes nothing."""
    return is_packed(folder) and not any(folder.glob("*.enc"))


def open_packed(folder: Path) -> Packed:
    """The description of a finished packing. All its shards exist and have the right sizes."""
    packed = read_finished(folder)
    damages = [damage for shard in packed.shards if (damage := size_damage(folder, packed, shard))]
    if damages:
        raise damaged_shard(folder, damages)
    return packed


def read_finished(folder: Path) -> Packed:
    """The description of a finished packing, without a check of its shards."""
    if not (folder / FINISHED).exists():
        raise DataError(
            "this packing was never finished",
            where=str(folder),
            hint=f"paceline data pack PICTURES {folder}    continues where it stopped",
        )
    packed = read_description(folder / FINISHED)
    for part in PARTS:
        num_pictures = packed.num_pictures(part) if part in packed.per_class else 0
        wanted = shard_layout(part, num_pictures, packed.pictures_per_shard, packed.suffix)
        if [(shard.file, shard.pictures) for shard in packed.shards_of(part)] != wanted:
            raise DataError(
                "the description of this packed data set is damaged",
                where=str(folder / FINISHED),
                got=f"it does not list the shards of {part}",
                hint=f"delete {folder} and pack the pictures again",
            )
    return packed


def read_description(path: Path) -> Packed:
    """Read `packed.json` or `packing.json`. Its checksum covers every bit."""
    try:
        body = parse_json(read_small(path, _LARGEST_JSON_BYTES), allows_raw_bytes=True)
        version = body["paceline_packed"]
        if version in (1, VERSION, ENCODED_VERSION):
            return _parse(body, version)
    except OSError as error:
        raise DataError("this file cannot be read", where=str(path), got=error.strerror) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "the description of this packed data set is damaged",
            where=str(path),
            got=str(error)[:80] or type(error).__name__,
            hint=f"delete {path.parent} and pack the pictures again",
        ) from error
    raise DataError(
        "this data set was packed by another version of Paceline",
        where=str(path),
        got=f"format {version!r}"[:40],
        allowed=f"formats 1 to {ENCODED_VERSION}",
        hint="pack the pictures again, or use the Paceline that packed them",
    )


def _parse(body: dict[str, Any], version: int) -> Packed:
    if body.pop("crc32") != _seal(body):
        raise ValueError("its checksum does not match")
    is_encoded = version == ENCODED_VERSION
    body = fit({**body, "decoder": 1} if version == 1 else body, _ENCODED_SHAPE if is_encoded else _SHAPE)
    if not {TRAIN, TEST} <= body["per_class"].keys() <= set(PARTS):
        raise ValueError("impossible parts")
    shards = tuple(Shard(**{**entry, "unreadable": tuple(entry["unreadable"])}) for entry in body["shards"])
    packed = Packed(
        classes=tuple(body["classes"]),
        per_class={part: tuple(body["per_class"][part]) for part in PARTS if part in body["per_class"]},
        side=0 if is_encoded else body["side"],
        pictures_per_shard=body["pictures_per_shard"],
        shards=shards,
        decoder=body["decoder"],
        encoding=Encoding(**body["encoding"]) if is_encoded else None,
        contents=dict(body["contents"]) if is_encoded else {},
    )
    # A forged description must not lead outside this folder or beyond the end of its files.
    if not all(_SHARD_NAME.fullmatch(shard.file) for shard in shards):
        raise ValueError("a shard has an impossible name")
    if not all(isinstance(name, str) and find_fault(name) is None for name in packed.classes):
        raise ValueError("a class has an impossible name")
    if any(len(sizes) != len(packed.classes) for sizes in packed.per_class.values()):
        raise ValueError("not one size for each class")
    if any(sum(sizes) > _MOST_PICTURES for sizes in packed.per_class.values()):
        raise ValueError("impossible sizes")
    return packed


def shard_layout(part: str, num_pictures: int, per_shard: int, suffix: str = "u8") -> list[tuple[str, int]]:
    """File name and number of pictures of each shard."""
    starts = range(0, num_pictures, per_shard)
    return [(f"{part}-{n:05}.{suffix}", min(per_shard, num_pictures - start)) for n, start in enumerate(starts)]


def _seal(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return f"{_checksums.crc32(canonical):08x}"


def crc32_of(content: Any) -> int:
    """CRC-32 of any object with the buffer protocol."""
    return int(_checksums.crc32(content))


def checksum(path: Path, tell: Callable[[int], None] = lambda size_bytes: None) -> str:
    """CRC-32 of a file, read piece by piece."""
    value = 0
    buffer = bytearray(_CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            value = _checksums.crc32(memoryview(buffer)[:size], value)
            tell(size)
    return f"{value:08x}"


def size_damage(folder: Path, packed: Packed, shard: Shard) -> str | None:
    """What is wrong with the size of a shard, or None."""
    wanted = packed.bytes_of(shard)
    try:
        found = (folder / shard.file).stat().st_size
    except OSError as error:
        return f"{shard.file}: {os.strerror(error.errno or 0).lower()}"
    return None if found == wanted else f"{shard.file}: {found:,} bytes instead of {wanted:,}"


def find_damage(folder: Path, packed: Packed, tell: Callable[[int], None]) -> Iterator[str]:
    """Yield a line for each shard whose bytes differ from the packed ones."""
    for shard in packed.shards:
        damage = size_damage(folder, packed, shard)
        if damage is None:
            try:
                found = checksum(folder / shard.file, tell)
            except OSError as error:
                damage = f"{shard.file}: {os.strerror(error.errno or 0).lower()}"
            else:
                damage = None if found == shard.crc32 else f"{shard.file}: CRC-32 {found} instead of {shard.crc32}"
        if damage is not None:
            yield damage


def damaged_shard(folder: Path, damages: list[str]) -> DataError:
    files = [damage.partition(":")[0] for damage in damages]
    is_one = len(files) == 1
    return DataError(
        f"shard {files[0]} is damaged" if is_one else f"{len(files)} shards are damaged",
        where=str(folder),
        got="\n".join(damages[:4] + ([f"and {len(damages) - 4} more"] if len(damages) > 4 else [])),
        hint=f"delete {'it' if is_one else 'them'}, then: paceline data pack PICTURES {folder}\n"
        f"makes only {'that one' if is_one else 'these'} again",
    )


def require_side(packed: Packed, folder: Path, image_size: int, *, can_shrink: bool) -> None:
    """Check the packed size against the run's input size. Larger pictures are accepted if the pipeline resizes."""
    wanted = picture_side(image_size)
    if packed.encoding is not None or packed.side == wanted or (can_shrink and packed.side > wanted):
        return
    raise UserError(
        "these pictures were packed for another input size",
        where=str(folder),
        got=f"{packed.side} x {packed.side} pixels; --image-size {image_size} needs {wanted} x {wanted}",
        hint=f"--image-size {round(packed.side * 224 / 256)}, or pack again with --image-size {image_size}",
    )
