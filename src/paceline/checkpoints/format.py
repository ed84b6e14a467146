"""A checkpoint on disk, and the proof that it is whole. Imports no torch: verifying must be cheap to start.

    step-00000700/
      model.safetensors  optimizer.safetensors  [ema.safetensors]      one set, or under FSDP one per rank:
      model-00000-of-00002.safetensors ...                             slices that know their place
      state.json       everything that is not a tensor
      manifest.json    size and CRC-32 of every file above, and of itself

What is not listed in the manifest is never opened. Names in it are matched against the ones above, sizes are
compared with the files' before a byte is read, and nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from isal import isal_zlib as _checksums  # the same sums as zlib's, several times as fast
except ImportError:  # pragma: no cover
    import zlib as _checksums  # type: ignore[no-redef]

SCHEMA_VERSION = 1
MANIFEST, STATE = "manifest.json", "state.json"
STEP_PREFIX = "step-"
_FILE_NAME = re.compile(r"(model|optimizer|ema|statistics)(-\d{5}-of-\d{5})?\.safetensors|state\.json")
_LARGEST_JSON_BYTES = 16 * 2**20
_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong with a checkpoint."""

    file: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.file}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True)
class FileSeal:
    """What a file must be."""

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
    """Carries what is wrong; the caller decides whether to fall back or to stop."""

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage


def read_manifest(folder: Path) -> Manifest:
    """Parse and check a manifest itself; the files it lists are checked by `find_damage`."""
    raw = _read_small(folder, MANIFEST)
    try:
        body = json.loads(raw)
        checksum = body.pop("crc32")
        if body["schema"] != SCHEMA_VERSION:
            known = f"schema {SCHEMA_VERSION}"
            raise DamagedCheckpoint(Damage(MANIFEST, known, f"schema {body['schema']} (a newer Paceline's?)"))
        if _sealed(body) != raw:
            raise DamagedCheckpoint(Damage(MANIFEST, f"checksum {checksum}", "other contents"))
        files = {
            name: FileSeal(int(entry["size_bytes"]), int(entry["crc32"], 16)) for name, entry in body["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(Damage(MANIFEST, "a sealed JSON object", "something unreadable")) from error
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise DamagedCheckpoint(Damage(MANIFEST, "names of checkpoint files", repr(name)[:80]))
    if STATE not in files:
        raise DamagedCheckpoint(Damage(MANIFEST, f"an entry for {STATE}", "none"))
    return Manifest(files, body["about"])


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Every listed file is a plain file of the stated size. Reads no contents."""
    for name, seal in manifest.files.items():
        try:
            found = (folder / name).lstat()
        except OSError:
            raise DamagedCheckpoint(Damage(name, f"{seal.size_bytes:,} bytes", "no such file")) from None
        if not stat.S_ISREG(found.st_mode):
            raise DamagedCheckpoint(Damage(name, "a plain file", "a link or folder"))
        if found.st_size != seal.size_bytes:
            raise DamagedCheckpoint(Damage(name, f"{seal.size_bytes:,} bytes", f"{found.st_size:,} bytes"))


def verify(folder: Path) -> Manifest:
    """Check a checkpoint down to its last bit; raises DamagedCheckpoint at the first fault."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    for name, seal in manifest.files.items():
        actual = checksum_of(folder / name)
        if actual != seal.crc32:
            raise DamagedCheckpoint(Damage(name, f"CRC-32 {seal.crc32:08x}", f"{actual:08x}"))
    return manifest


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON half of a verified checkpoint."""
    try:
        state: dict[str, Any] = json.loads(_read_small(folder, STATE))
        state["step"] = int(state["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(Damage(STATE, "a JSON object with a step", "something unreadable")) from error
    return state


def add_checksum(data: bytes | memoryview, total: int = 0) -> int:
    """CRC-32 of what was summed so far, with more data at its end."""
    return int(_checksums.crc32(data, total))


def checksum_of(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            total = add_checksum(chunk, total)
    return total


def step_folders(folder: Path) -> list[Path]:
    """Committed checkpoints, newest first: by step, never by time."""
    found = [path for path in folder.glob(f"{STEP_PREFIX}*") if path.is_dir() and not path.is_symlink()]
    numbered = [path for path in found if path.name.removeprefix(STEP_PREFIX).isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix(STEP_PREFIX)), reverse=True)


def chunks_of(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]


def _sealed(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, indent=1, sort_keys=True)
    return (text[:-2] + f',\n "crc32": "{add_checksum(text.encode()):08x}"\n}}\n').encode()


def _read_small(folder: Path, name: str) -> bytes:
    """A JSON file of a checkpoint: a plain file of a size that JSON may have."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise DamagedCheckpoint(Damage(name, "a plain file", error.strerror or "nothing")) from error
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LARGEST_JSON_BYTES:
            raise DamagedCheckpoint(Damage(name, f"at most {_LARGEST_JSON_BYTES:,} bytes", f"{size:,}"))
        return file.read(_LARGEST_JSON_BYTES + 1)
