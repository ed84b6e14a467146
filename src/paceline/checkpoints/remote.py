"""Checkpoints in an object store: the same folders as on disk, committed in the same order.

Payload is uploaded first, then state.json, then the manifest: without a manifest a checkpoint does not exist. `latest`
and `best` are small files that contain a name. Each file is checked after its upload: its size, and the MD5 of the
store; if the store keeps no MD5, the file is read back. A removal starts with the manifest. A fetched checkpoint is
verified before it gets its name on disk.

A store has no locks, so two starts may write to it for a moment. A process removes only what it has uploaded itself or
has seen when it claimed the store, and only while that is unchanged.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoints import store as disk
from paceline.checkpoints.format import (
    CHUNK_BYTES,
    LARGEST_JSON_BYTES,
    MANIFEST,
    STATE,
    Damage,
    DamagedCheckpoint,
    FileSeal,
    Manifest,
    add_checksum,
    is_step_name,
    parse_manifest,
    read_manifest,
    step_of,
)
from paceline.runs.stores import Store, Stored, StoreError
from paceline.settings.small_files import parse_json

FOLDER = "checkpoints"
POINTERS = ("latest", "best")
_PART_BYTES = 50 * 2**20  # of a multipart upload by s3fs, whose ETag is an MD5 of its parts' MD5s


@dataclass(frozen=True)
class Remote:
    """A step folder in the store, complete or not."""

    name: str
    files: dict[str, Stored]

    @property
    def step(self) -> int:
        return step_of(Path(self.name))

    @property
    def is_sealed(self) -> bool:
        return MANIFEST in self.files


@dataclass
class RemoteCheckpoints:
    """The checkpoints of one run in its store."""

    store: Store
    _known: dict[str, dict[str, Stored]] = field(default_factory=dict)  # what this process may remove, as it saw it
    _states: dict[str, dict[str, Any]] = field(default_factory=dict)  # of those that may be removed later

    def list(self) -> list[Remote]:
        """Newest first."""
        found: dict[str, dict[str, Stored]] = {}
        for path, stored in self.store.list(FOLDER).items():
            parts = path.split("/")
            if len(parts) == 3 and is_step_name(parts[1]):
                found.setdefault(parts[1], {})[parts[2]] = stored
        return sorted((Remote(name, files) for name, files in found.items()), key=lambda r: r.step, reverse=True)

    def remember(self) -> dict[str, Remote]:
        """At the first contact: what is there now may be removed later. By name."""
        found = {remote.name: remote for remote in self.list()}
        self._known = {name: remote.files for name, remote in found.items()}
        return found

    def is_unchanged(self, remote: Remote | None) -> bool:
        """Whether it is as this process has uploaded or seen it. Another start may have uploaded the same step."""
        return remote is not None and self._known.get(remote.name) == remote.files

    def manifest_of(self, remote: Remote) -> Manifest:
        """Its manifest, if every file listed there has its size. Raises DamagedCheckpoint."""
        manifest = parse_manifest(self._read(remote, MANIFEST))
        for name, seal in manifest.files.items():
            stored = remote.files.get(name)
            got = f"{stored.size_bytes:,} bytes" if stored else "no such file"
            if stored is None or stored.size_bytes != seal.size_bytes:
                raise DamagedCheckpoint(Damage(name, f"{seal.size_bytes:,} bytes", got))
        return manifest

    def is_same(self, remote: Remote | None, local: Path) -> bool:
        """Whether the store has the same checkpoint, by manifest and sizes."""
        if remote is None or not remote.is_sealed:
            return False
        try:
            return self.manifest_of(remote) == read_manifest(local)
        except DamagedCheckpoint:
            return False

    def send(self, local: Path, remote: Remote | None) -> Iterator[str]:
        """Upload a checkpoint file by file. Each file is checked, and its name is yielded."""
        manifest = read_manifest(local)
        there = remote.files if remote else {}
        if MANIFEST in there:  # from before a rewind, or damaged: from now on it is incomplete
            self.store.remove(f"{FOLDER}/{local.name}/{MANIFEST}")
        for name in sorted(manifest.files, key=lambda name: name == STATE):
            mark = _fingerprint(local / name)
            if mark.seal != manifest.files[name]:
                raise DamagedCheckpoint(Damage(name, f"CRC-32 {manifest.files[name].crc32:08x}", str(mark.seal)))
            if name not in there or not mark.is_etag(there[name]):
                self.store.put(local / name, f"{FOLDER}/{local.name}/{name}")
                self._compare(f"{FOLDER}/{local.name}/{name}", mark)
            yield name
        self.store.put(local / MANIFEST, f"{FOLDER}/{local.name}/{MANIFEST}")
        if self.store.read(f"{FOLDER}/{local.name}/{MANIFEST}", LARGEST_JSON_BYTES) != (local / MANIFEST).read_bytes():
            raise StoreError(f"{MANIFEST} of {local.name} reads back with other bytes than were uploaded")
        self._states.pop(local.name, None)
        self._known[local.name] = next(item.files for item in self.list() if item.name == local.name)
        yield MANIFEST

    def point(self, pointer: str, name: str) -> None:
        self.store.write(f"{FOLDER}/{pointer}", f"{name}\n".encode())

    def pointed_at(self, pointer: str) -> str:
        """The name in a pointer; empty if it is not there, or names no step."""
        name = (self.store.read(f"{FOLDER}/{pointer}") or b"").decode(errors="replace").strip()
        return name if is_step_name(name) else ""

    def prune(self, newest: str, own: dict[str, dict[str, Any]], retention: disk.Retention, *, went_back: bool) -> bool:
        """Remove what the retention rules no longer keep. False, without a removal, if the newest is incomplete here.

        `newest` is the newest that was uploaded. `own` are those on disk, with their states: they stay. If the run went
        back to an earlier step, later checkpoints are removed, as on disk; those marked to be kept get another name.
        """
        remotes = {remote.name: remote for remote in self.list()}
        if not self._is_complete(remotes.get(newest)):
            return False
        others = {name: remote for name, remote in remotes.items() if name not in own and name != newest}
        states = {name: state for name, remote in others.items() if (state := self._state_of(remote)) is not None}
        step = step_of(Path(newest))
        later = {name for name, remote in others.items() if remote.step > step} if went_back else set()
        mine = {**own, newest: own.get(newest) or self._state_of(remotes[newest]) or {}}
        candidates = {name: state for name, state in (states | mine).items() if name not in later}
        ordered = dict(sorted(candidates.items(), key=lambda item: step_of(Path(item[0])), reverse=True))
        kept = disk.choose_kept(ordered, retention) | {*mine} | {self.pointed_at(pointer) for pointer in POINTERS}
        for name, remote in others.items():
            if not self.is_unchanged(remote):
                continue
            if name in later and states.get(name, {}).get("keep"):
                self._rename_superseded(remote)
            elif name in later or name not in kept:
                self._drop(remote)
        return True

    def _is_complete(self, remote: Remote | None) -> bool:
        return remote is not None and self.is_unchanged(remote) and self._state_of(remote) is not None

    def fetch(self, remote: Remote, folder: Path, before_naming: Callable[[], None] = lambda: None) -> Path:
        """Fetch a checkpoint and verify it before it gets its name. Raises DamagedCheckpoint.

        before_naming: fetches the other files. A checkpoint that has its name is never fetched again.
        """
        manifest = self.manifest_of(remote)
        temporary = disk.temporary_folder(folder, remote.step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            for name in (*manifest.files, MANIFEST):
                self.store.get(f"{FOLDER}/{remote.name}/{name}", temporary / name)
            return disk.commit_copy(temporary, before_naming)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    # --- Single files and folders

    def _read(self, remote: Remote, name: str) -> bytes:
        raw = self.store.read(f"{FOLDER}/{remote.name}/{name}", LARGEST_JSON_BYTES) if name in remote.files else None
        if raw is None:
            raise DamagedCheckpoint(Damage(name, "a file", "no such file"))
        return raw

    def _state_of(self, remote: Remote) -> dict[str, Any] | None:
        """None if it is incomplete."""
        if not remote.is_sealed:
            return None
        if remote.name not in self._states:
            try:
                self.manifest_of(remote)
                self._states[remote.name] = dict(parse_json(self._read(remote, STATE)))
            except (DamagedCheckpoint, ValueError, TypeError):
                return None
        return self._states[remote.name]

    def _compare(self, path: str, mark: _Fingerprint) -> None:
        stored = self.store.info(path)
        if stored is None or stored.size_bytes != mark.seal.size_bytes:
            got = f"{stored.size_bytes:,}" if stored else "no"
            raise StoreError(f"{path} has {got} bytes in the store instead of {mark.seal.size_bytes:,}")
        if mark.is_etag(stored):
            return
        if self.store.sum_up(path, add_checksum) != mark.seal.crc32:
            raise StoreError(f"{path} reads back with other bytes than were uploaded")

    def _drop(self, remote: Remote) -> None:
        for name in sorted(remote.files, key=lambda name: name != MANIFEST):
            self.store.remove(f"{FOLDER}/{remote.name}/{name}")
        self._states.pop(remote.name, None)

    def _rename_superseded(self, remote: Remote) -> None:
        for name in sorted(remote.files, key=lambda name: name == MANIFEST):
            self.store.copy(f"{FOLDER}/{remote.name}/{name}", f"{FOLDER}/superseded-{remote.name}/{name}")
        self._drop(remote)


@dataclass(frozen=True)
class _Fingerprint:
    """Checksums of a file on this disk: the one of the manifest, and the ETags that a store may show."""

    seal: FileSeal
    md5: str
    parts_md5: str

    def is_etag(self, stored: Stored) -> bool:
        return stored.size_bytes == self.seal.size_bytes and stored.etag in (self.md5, self.parts_md5)


def _fingerprint(path: Path) -> _Fingerprint:
    total, size, digests = 0, 0, []
    whole, part = hashlib.md5(usedforsecurity=False), hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(math.gcd(CHUNK_BYTES, _PART_BYTES)):
            total, size = add_checksum(chunk, total), size + len(chunk)
            whole.update(chunk)
            part.update(chunk)
            if size % _PART_BYTES == 0:
                digests.append(part.digest())
                part = hashlib.md5(usedforsecurity=False)
    if size % _PART_BYTES:
        digests.append(part.digest())
    joined = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return _Fingerprint(FileSeal(size, total), whole.hexdigest(), f"{joined}-{len(digests)}")
