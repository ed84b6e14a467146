"""The files of a checkpoint, and their verification. Imports no torch, so that a check starts fast.

    step-00000700/
      model.safetensors  optimizer.safetensors  [ema.safetensors]      one set, or under FSDP one per rank:
      model-00000-of-00002.safetensors ...                             slices with their place in the whole
      state.json       everything that is not a tensor
      manifest.json    size and CRC-32 of every file above, and of itself

A file that is not listed in the manifest is never opened. Names in it must be those above, sizes are compared with
those of the files before a byte is read, and nothing is unpickled. CRC-32 finds accidental damage, not manipulation:
every file is parsed as data, with bounds, whatever its checksum says.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from paceline.runs.json_files import COUNT, Fields, fit
from paceline.runs.patience import UnreadableNow
from paceline.settings.small_files import parse_json

try:
    from isal import isal_zlib as _checksums  # the same sums as zlib's, several times as fast
except ImportError:  # pragma: no cover
    import zlib as _checksums  # type: ignore[no-redef]

SCHEMA_VERSION = 1
MANIFEST, STATE = "manifest.json", "state.json"
STEP_PREFIX = "step-"
REPLACED_PREFIX = "replaced-"  # of a checkpoint that is replaced by a new one of the same step
_FILE_NAME = re.compile(r"(model|optimizer|ema|statistics)(-[0-9]{5}-of-[0-9]{5})?\.safetensors|state\.json")
LARGEST_JSON_BYTES = 16 * 2**20
CHUNK_BYTES = 4 * 2**20  # read, written and summed at once
_SEAL = ',\n "crc32": "%08x"\n}\n'
_SEAL_BYTES = len(_SEAL % 0)
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_MOST_DIMENSIONS = 64
_ABOUT = Fields(optional={"world_size": COUNT})
# The file is missing, or is not a plain file: a link (not followed), a folder or a pipe.
_NOT_A_FILE = errno.EISDIR
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, _NOT_A_FILE)
# What a parser may raise on untrusted bytes.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Damage:
    """One fault of a checkpoint."""

    file: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.file}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True)
class FileSeal:
    """Size and checksum of a file."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents."""

    files: dict[str, FileSeal]
    about: dict[str, Any]  # step, world_size, strategy, config_hash, paceline and torch versions

    def to_bytes(self) -> bytes:
        """Canonical JSON that ends in its own checksum: every bit of the file counts."""
        files = {name: {"size_bytes": f.size_bytes, "crc32": f"{f.crc32:08x}"} for name, f in self.files.items()}
        body = {"schema": SCHEMA_VERSION, "files": files, "about": self.about}
        return _sealed(body)

    @property
    def size_bytes(self) -> int:
        return sum(seal.size_bytes for seal in self.files.values())


class DamagedCheckpoint(Exception):
    """A damaged checkpoint. The caller decides whether to use an older one or to stop."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage


class NewerSchema(DamagedCheckpoint):
    """A valid checkpoint of a newer version. Using an older one would lose good work."""


def read_manifest(folder: Path) -> Manifest:
    """Parse and check a manifest itself; the files it lists are checked by `verify`."""
    return parse_manifest(_read_small(folder, MANIFEST))


def parse_manifest(raw: bytes) -> Manifest:
    _check_seal(raw)
    try:
        body = parse_json(raw)
        schema, about = int(body["schema"]), fit(body["about"], _ABOUT)
        if schema != SCHEMA_VERSION:
            kind = NewerSchema if schema > SCHEMA_VERSION else DamagedCheckpoint
            raise kind(Damage(MANIFEST, f"schema {SCHEMA_VERSION}", f"schema {str(schema)[:20]}"))
        files = {
            name: FileSeal(int(entry["size_bytes"]), int(entry["crc32"], 16)) for name, entry in body["files"].items()
        }
    except _MALFORMED as error:
        raise DamagedCheckpoint(Damage(MANIFEST, "a table of files", "something unreadable")) from error
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise DamagedCheckpoint(Damage(MANIFEST, "names of checkpoint files", repr(name)[:80]))
    if STATE not in files:
        raise DamagedCheckpoint(Damage(MANIFEST, f"an entry for {STATE}", "none"))
    return Manifest(files, about)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Every listed file is a plain file of the stated size. Reads no contents."""
    for name, seal in manifest.files.items():
        try:
            found = (folder / name).lstat()
        except OSError as error:
            raise _judge_error(folder / name, f"{seal.size_bytes:,} bytes", error) from error
        if not stat.S_ISREG(found.st_mode):
            raise DamagedCheckpoint(Damage(name, "a plain file", "a link or folder"))
        if found.st_size != seal.size_bytes:
            raise DamagedCheckpoint(Damage(name, f"{seal.size_bytes:,} bytes", f"{found.st_size:,} bytes"))


def check_headers(folder: Path, manifest: Manifest) -> None:
    """Every payload file begins with a safetensors header that accounts for its size. Reads no tensor."""
    for name, seal in manifest.files.items():
        if name != STATE:
            try:
                _check_header(folder / name, seal.size_bytes)
            except OSError as error:
                raise _judge_error(folder / name, "a plain file", error) from error
            except _MALFORMED as error:
                raise DamagedCheckpoint(Damage(name, "a safetensors file", "something else")) from error


def verify(folder: Path) -> Manifest:
    """Check every bit of a checkpoint.

    Raises DamagedCheckpoint at the first fault; UnreadableNow if the storage does not give the bytes.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    check_headers(folder, manifest)  # before the checksums: a file without a valid header need not be read completely
    for name, seal in manifest.files.items():
        try:
            actual = checksum_of(folder / name)
        except OSError as error:
            raise _judge_error(folder / name, "a plain file", error) from error
        if actual != seal.crc32:
            raise DamagedCheckpoint(Damage(name, f"CRC-32 {seal.crc32:08x}", f"{actual:08x}"))
    return manifest


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON half of a checkpoint."""
    try:
        state = dict(parse_json(_read_small(folder, STATE), allows_raw_bytes=True))
        state["step"] = int(state["step"])
        if not 0 <= state["step"] < 2**48:
            raise ValueError("no step of a run")
        state["config"] = dict(state.get("config", {}))
    except _MALFORMED as error:
        raise DamagedCheckpoint(Damage(STATE, "a JSON object with a step", "something unreadable")) from error
    return state


def add_checksum(data: bytes | memoryview, total: int = 0) -> int:
    """CRC-32 of what was summed so far, with more data at its end."""
    return int(_checksums.crc32(data, total))


def checksum_of(path: Path) -> int:
    total = 0
    buffer = memoryview(bytearray(min(CHUNK_BYTES, path.lstat().st_size)))  # one for all chunks: no page faults
    with _open_plain(path) as file:
        while count := file.readinto(buffer):
            total = add_checksum(buffer[:count], total)
    return total


def step_folders(folder: Path) -> list[Path]:
    """Committed checkpoints, newest first: by step, never by time.

    A folder that cannot be listed raises UnreadableNow: as an empty folder it would start a run at step 0.
    """
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UnreadableNow(folder, error) from error
    steps = {name for name in names if is_step_name(name)}
    # A save of an existing step may end between two renames. The old checkpoint then has this name.
    steps |= {name for name in names if is_replaced_name(name) and name.removeprefix(REPLACED_PREFIX) not in steps}
    return sorted((folder / name for name in steps), key=step_of, reverse=True)


def is_step_name(name: str) -> bool:
    return name.startswith(STEP_PREFIX) and name.removeprefix(STEP_PREFIX).isdecimal()


def is_replaced_name(name: str) -> bool:
    return name.startswith(REPLACED_PREFIX) and is_step_name(name.removeprefix(REPLACED_PREFIX))


def chunks_of(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def step_of(path: Path) -> int:
    """The number in a step folder's name."""
    return int(path.name.rpartition(STEP_PREFIX)[2])


def _sealed(body: dict[str, Any]) -> bytes:
    return _seal(json.dumps(body, indent=1, sort_keys=True).encode())


def _seal(text: bytes) -> bytes:
    """JSON text whose last member is the checksum of the text without it. This holds for every schema."""
    return text.removesuffix(b"\n}") + (_SEAL % add_checksum(text)).encode()


def _check_seal(raw: bytes) -> None:
    """Check the checksum of a manifest, before it is parsed."""
    sealed = _seal(raw[:-_SEAL_BYTES] + b"\n}")
    if raw != sealed:
        found, wanted = (text[-_SEAL_BYTES:].decode(errors="replace") for text in (raw, sealed))
        is_other_sum = _SEAL.split("%")[0] in found
        expected = f"CRC-32 {found[-12:-4]}" if is_other_sum else "a checksum at its end"
        raise DamagedCheckpoint(Damage(MANIFEST, expected, wanted[-12:-4] if is_other_sum else "none"))


def _check_header(path: Path, size_bytes: int) -> None:
    """Raises one of _MALFORMED unless tensors of known types fill the file, one after the other."""
    with _open_plain(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(LARGEST_JSON_BYTES, size_bytes - 8):
            raise ValueError("too long")
        header = parse_json(file.read(length))
    header.pop("__metadata__", None)
    position = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        start, end = entry["data_offsets"]
        if start != position:
            raise ValueError("not where it should be")
        position += _number_of_items(entry["shape"]) * _ITEM_BYTES[entry["dtype"]]
        if end != position:
            raise ValueError("not as large as its shape says")
    if 8 + length + position != size_bytes:
        raise ValueError("not all of the file")


def _number_of_items(shape: list[int]) -> int:
    if len(shape) > _MOST_DIMENSIONS or any(type(size) is not int or not 0 <= size < 2**48 for size in shape):
        raise ValueError("no shape of a tensor")
    return math.prod(shape)


def _read_small(folder: Path, name: str) -> bytes:
    """A JSON file of a checkpoint: a plain file of a size that JSON may have."""
    try:
        with _open_plain(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_JSON_BYTES:
                raise DamagedCheckpoint(Damage(name, f"at most {LARGEST_JSON_BYTES:,} bytes", f"{size:,}"))
            return file.read(LARGEST_JSON_BYTES + 1)
    except OSError as error:
        raise _judge_error(folder / name, "a plain file", error) from error


def _judge_error(path: Path, expected: str, error: OSError) -> DamagedCheckpoint | UnreadableNow:
    """A missing file, or one that is not a plain file, is damage. Any other error of the storage is not."""
    if error.errno in _NO_SUCH_FILE:
        return DamagedCheckpoint(Damage(path.name, expected, error.strerror or "nothing"))
    return UnreadableNow(path, error)


def _open_plain(path: Path) -> BufferedReader:
    """Open a plain file: not a link, a folder or a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(_NOT_A_FILE, "something that is no file")
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")
