"""A run folder in an object store: the destination of the uploads of a run with `--output-dir s3://...`.

The newest checkpoint is uploaded first, then the others; the small files every ten seconds. `mirror.json` in the store
holds the token of the start that writes there. Another start, on another machine, writes its own token. The token is
read before every change, so the first start then changes nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.checkpoints import store as disk
from paceline.checkpoints.format import DamagedCheckpoint, read_state, step_folders, step_of
from paceline.checkpoints.remote import FOLDER, POINTERS, RemoteCheckpoints
from paceline.checkpoints.uploader import CheckpointUploader, Progress, TakenOver, id_of
from paceline.runs.folder import MIRROR_NOTE, RunFolder
from paceline.runs.owner import LOCK, OWNER_FILE
from paceline.runs.stores import MirrorNote, Store, StoreError, open_store, parse_note, read_own_note

_SMALL_FILES_EVERY_S = 10.0
_OWN_FILES = (MIRROR_NOTE, LOCK, OWNER_FILE)


class StoreMirror:
    """The copy of one run folder in its store. A `Destination` of `CheckpointUploader`."""

    shows_progress = True

    def __init__(self, folder: RunFolder, note: MirrorNote) -> None:
        self.name = note.url
        self.progress = Progress()
        self._folder = folder
        self._note = note
        self._remote: RemoteCheckpoints | None = None
        self._uploaded: dict[str, int] = {}  # ids of checkpoints that are complete in the store
        self._pointed: dict[str, str] = {}
        self._sent: dict[str, tuple[int, int]] = {}  # small files: time and size when they were uploaded
        self._small_files_due_s = 0.0
        self._has_uploaded_newest = False
        self._must_prune = True  # an earlier start may have ended before it did

    def has_changes(self) -> bool:
        is_due = time.monotonic() >= self._small_files_due_s
        return is_due or self._must_prune or self._remote is None or self._pointers() != self._pointed

    def missing(self) -> list[Path]:
        """The newest, the best, then the others from new to old."""
        paths = step_folders(self._folder.checkpoints)
        best = disk.pointed_at(self._folder.checkpoints, "best")
        ids = {path: id_of(path) for path in paths}
        missing = [path for path in paths if ids[path][1] and ids[path] not in self._uploaded.items()]
        return sorted(missing, key=lambda path: (path != paths[0], path != best, -step_of(path)))

    def open(self, *, is_last: bool) -> None:
        """At the first contact: find out which checkpoints are already there."""
        self._folder.require_owner()
        if self._remote is None:
            store = open_store(
                self.name, MIRROR_NOTE, on_progress=self.progress.advance, before_change=self._require_own_token
            )
            remote = RemoteCheckpoints(store)
            stored = remote.remember()
            for path in step_folders(self._folder.checkpoints):
                if remote.is_same(stored.get(path.name), path):
                    self._uploaded.update([id_of(path)])
            self._remote = remote
        if is_last:
            self._compare(self._remote)

    def upload(self, checkpoint: Path, pinned: Path) -> Iterator[str]:
        remote, own_id = self._opened(), id_of(checkpoint)
        is_newest = checkpoint == next(iter(step_folders(self._folder.checkpoints)), None)
        # The rows up to a checkpoint are on disk before it is, and a resume from it needs them.
        of_steps = (self._folder.metrics_jsonl, self._folder.steps, self._folder.ledger)
        self._send_small_files(remote.store, only=[path.name for path in of_steps])
        stored = next((item for item in remote.list() if item.name == checkpoint.name), None)
        yield from remote.send(pinned, stored)
        self._uploaded.update([own_id])
        self._must_prune = True
        self._has_uploaded_newest |= is_newest
        self._point(remote)
        self._prune(remote)

    def update(self, *, is_last: bool) -> None:
        remote = self._opened()
        self._point(remote)
        self._prune(remote)
        if is_last:  # with the final state of the upload in status.json
            self._folder.update_mirror_status()
        if is_last or time.monotonic() >= self._small_files_due_s:
            self._send_small_files(remote.store)
            self._small_files_due_s = time.monotonic() + _SMALL_FILES_EVERY_S
        if is_last:
            self._require_everything(remote)

    def record(self, state: str) -> None:
        if state != self._note.says:
            self._note = replace(self._note, says=state)
            with suppress(OSError):  # a full disk, which the run itself reports
                self._note.write(self._folder.path)

    def finish_complete(self) -> None:
        newest = self.newest_step()
        until = "" if newest is None else f", checkpoints up to step {newest}"
        is_finished = self._folder.read_status().get("status") == "finished"
        then = "" if is_finished else f"; continue anywhere with the same flags, --output-dir {self.name} --resume auto"
        print(f"the store has everything: {self.name}{until}{then}", flush=True)

    def finish_behind(self) -> str:
        with suppress(OSError):
            self._folder.update_mirror_status()
        return (
            f"\n  folder:  {self._folder.path}"
            f"\n  push it: paceline checkpoints {self._folder.path} --push"
            "\n           (a rerun with --resume does so too; until then, keep this folder)"
        )

    def newest_step(self) -> int | None:
        return max((step_of(Path(name)) for name in self._uploaded), default=None)

    def describe(self, error: Exception) -> str:
        return " ".join(str(error).split()) or type(error).__name__

    # --- What is in the store

    def _opened(self) -> RemoteCheckpoints:
        assert self._remote is not None
        return self._remote

    def _compare(self, remote: RemoteCheckpoints) -> None:
        """Forget what was replaced or removed in the store since its upload: it is uploaded again."""
        stored = {item.name: item for item in remote.list()}
        self._uploaded = {name: crc for name, crc in self._uploaded.items() if remote.is_unchanged(stored.get(name))}
        self._pointed = {name: to for name, to in self._pointed.items() if remote.pointed_at(name) == to}
        files = remote.store.list()
        self._sent = {name: mark for name, mark in self._sent.items() if name in files}
        if MIRROR_NOTE not in files:
            remote.store.put(self._folder.path / MIRROR_NOTE, MIRROR_NOTE)

    def _require_everything(self, remote: RemoteCheckpoints) -> None:
        """After the last file: a store that has lost files meanwhile is behind."""
        self._compare(remote)
        lost = [name for name, to in self._pointers().items() if self._pointed.get(name) != to]
        lost += [name for name in _small_files(self._folder.path) if name not in self._sent]
        if lost:
            raise StoreError(f"{lost[0]} is no longer in the store, though it was uploaded")

    def _require_own_token(self, store: Store) -> None:
        raw = store.read(MIRROR_NOTE)
        found = parse_note(raw.decode(errors="replace")) if raw else None
        if found is not None and found.token != self._note.token:
            raise TakenOver

    # --- Changes in the store

    def _pointers(self) -> dict[str, str]:
        """What `latest` and `best` should name in the store: only checkpoints that are complete there."""
        targets = {name: disk.pointed_at(self._folder.checkpoints, name) for name in POINTERS}
        return {name: path.name for name, path in targets.items() if path and id_of(path) in self._uploaded.items()}

    def _point(self, remote: RemoteCheckpoints) -> None:
        for pointer, name in self._pointers().items():
            if self._pointed.get(pointer) != name:
                remote.point(pointer, name)
                self._pointed[pointer] = name

    def _prune(self, remote: RemoteCheckpoints) -> None:
        paths = step_folders(self._folder.checkpoints)
        # The newest that was uploaded, not the newest on disk: a store that is always behind must be pruned too. Later
        # ones than those on disk are from before the run went back.
        uploaded = [name for name in self._uploaded if paths and step_of(Path(name)) <= step_of(paths[0])]
        if not self._must_prune or not uploaded:
            return
        newest = max(uploaded, key=lambda name: step_of(Path(name)))
        retention = disk.Retention(self._note.keep_last, self._note.keep_best)
        own = {path.name: _state_of(path) for path in paths}
        if not remote.prune(newest, own, retention, went_back=self._has_uploaded_newest):
            del self._uploaded[newest]
            if newest not in own:
                return  # pruned here meanwhile; a newer one follows
            raise StoreError(f"{newest} is not complete in the store, though it was uploaded")
        self._must_prune = False

    def _send_small_files(self, store: Store, only: Collection[str] = ()) -> None:
        for name, mark in _small_files(self._folder.path).items():
            if self._sent.get(name) != mark and (not only or name in only):
                with suppress(FileNotFoundError):
                    store.put(self._folder.path / name, name)
                    self._sent[name] = mark
                self.progress.advance()


@contextmanager
def mirrored(folder: RunFolder, gives_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Upload the run folder to its store, if it has one, until the end of the block."""
    note = read_own_note(folder.path)
    if note is None:
        yield
        return
    uploader = CheckpointUploader(folder, StoreMirror(folder, note))
    uploader.start()
    try:
        yield
    finally:
        uploader.close(gives_up)


def _small_files(folder: Path) -> dict[str, tuple[int, int]]:
    """All files beside the checkpoints, with time and size, which show whether a file has changed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if parts[0] == FOLDER or parts[-1] in _OWN_FILES or any(part.startswith(".") for part in parts):
            continue
        with suppress(FileNotFoundError):
            about = path.stat()
            if about.st_size and path.is_file() and not path.is_symlink():
                found["/".join(parts)] = (about.st_mtime_ns, about.st_size)
    return found


def _state_of(path: Path) -> dict[str, Any]:
    """Empty if it is damaged on this disk. The copy in the store stays."""
    try:
        return read_state(path)
    except DamagedCheckpoint:
        return {}
