"""A run folder's way to its object store, beside training.

Whoever owns the run folder mirrors it: our supervisor, or under another launcher the primary. A thread looks at the
folder and makes the store look the same: the newest checkpoint first, one at a time, then the others, now and then
the small files. It reads finished files only, so training never waits for it and knows nothing of it. A store that
fails is asked again, with growing pauses; the run says once that the store is behind, and once that it has caught up.

`mirror.json` in the store holds a token of the start that writes there. Another start, on another machine, puts its
own. The token is read before every change, so this one then changes nothing more.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoints import store as disk
from paceline.checkpoints.format import MANIFEST, DamagedCheckpoint, add_checksum, read_state, step_folders, step_of
from paceline.checkpoints.remote import FOLDER, POINTERS, RemoteCheckpoints
from paceline.errors import OwnerLost
from paceline.runs.folder import MIRROR_NOTE, RunFolder
from paceline.runs.mirror_note import MirrorNote, parse_note, read_own_note
from paceline.runs.owner import LOCK, OWNER_FILE
from paceline.runs.patience import UnreadableNow
from paceline.runs.stores import Store, StoreTrouble, open_store
from paceline.runtime.running_clock import RunningClock
from paceline.settings.variables import STORE_TIMEOUT, read_number

PATIENCE = STORE_TIMEOUT
_PATIENCE_S = 60.0  # at the end of a run: how long the store may make no progress
_LOOK_EVERY_S, _SMALL_FILES_EVERY_S = 1.0, 10.0
_LONGEST_PAUSE_S, _LAST_PAUSE_S = 30.0, 1.0
_JOIN_POLL_S = 0.05
_PINS = ".mirror"  # hard links to what is being sent, so that nobody can drop it meanwhile
_OWN_FILES = (MIRROR_NOTE, LOCK, OWNER_FILE)
Seal = tuple[str, int]  # a checkpoint's name and the checksum of its manifest


class TakenOver(Exception):
    """Another start writes to the store now."""


class Mirror:
    """Mirrors one run folder until it is closed."""

    def __init__(self, folder: RunFolder, note: MirrorNote) -> None:
        self._folder = folder
        self._note = note
        self._remote: RemoteCheckpoints | None = None
        self._whole: dict[str, int] = {}  # checkpoints that the store holds, as seals
        self._damaged: set[Seal] = set()  # on this disk: not worth sending
        self._pointed: dict[str, str] = {}
        self._sent: dict[str, tuple[int, int]] = {}  # small files: time and size when they were sent
        self._small_due_s = 0.0
        self._has_sent_newest = False
        self._must_prune = True  # an earlier start may have ended before it did
        self._since = ""
        self._trouble = ""
        self._is_told = False  # that the store is behind
        self._progress_s = time.monotonic()
        self._is_closing, self._is_over = threading.Event(), threading.Event()
        self._is_taken_over = self._has_arrived = False
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, gives_up: Callable[[], bool] = lambda: False) -> bool:
        """Send the rest, for as long as the store makes progress; says and returns whether everything arrived."""
        patience_s = read_number(PATIENCE, _PATIENCE_S)
        self._progress_s = time.monotonic()
        clock, progress_s, since_s = RunningClock(), self._progress_s, 0.0
        self._is_closing.set()
        while self._thread.is_alive():
            self._thread.join(_JOIN_POLL_S)
            now_s = clock.seconds  # without a suspension, which is no delay of the store
            if self._progress_s != progress_s:
                progress_s, since_s = self._progress_s, now_s
            if gives_up() or now_s - since_s > patience_s:
                break
        self._is_over.set()
        shutil.rmtree(self._folder.path / _PINS, ignore_errors=True)
        if self._has_arrived:
            is_finished = self._folder.read_status().get("status") == "finished"
            then = (
                "" if is_finished else f"; go on anywhere: the same flags, --output-dir {self._note.url} --resume auto"
            )
            print(f"the store has everything: {self._note.url}{self._newest_in_words()}{then}", flush=True)
        elif not self._is_taken_over:
            self._tell_behind()
        return self._has_arrived

    # --- The thread

    def _run(self) -> None:
        pause_s = _LOOK_EVERY_S
        shutil.rmtree(self._folder.path / _PINS, ignore_errors=True)
        while not self._is_over.is_set():
            is_last = self._is_closing.is_set()
            try:
                self._round(everything=is_last)
                pause_s = _LOOK_EVERY_S
                if is_last:
                    self._has_arrived = True
                    return
            except OwnerLost:
                self._is_taken_over = True  # the owner says so itself
                return
            except TakenOver:
                self._is_taken_over = True
                self._say("no longer mirrored from here: another start writes there")
                _tell(f"warning: another start of this run writes to {self._note.url} now; this one no longer does")
                return
            except Exception as error:  # whatever it is, it must not end the mirror silently
                self._stumble(error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if self._is_closing.is_set():
                self._is_over.wait(_LAST_PAUSE_S if self._trouble else 0)
            else:
                self._is_closing.wait(pause_s)

    def _round(self, *, everything: bool) -> None:
        """Send what is new. Asks the store nothing when there is nothing new."""
        missing = self._missing()
        pointers = self._pointers()
        is_due = everything or time.monotonic() >= self._small_due_s
        if not (missing or is_due or self._must_prune or pointers != self._pointed or self._remote is None):
            return
        self._folder.require_owner()
        remote = self._open()
        if everything:
            self._look_again(remote)
        while missing := self._missing():
            self._say_behind(missing)
            self._send(remote, missing[0])
        self._point(remote)
        self._prune(remote)
        if is_due:
            self._send_small_files(remote.store)
            self._small_due_s = time.monotonic() + _SMALL_FILES_EVERY_S
        self._catch_up()
        if everything:  # the last word on the mirror is in the store too
            self._folder.update_mirror_status()
            self._send_small_files(remote.store)
            self._require_everything(remote)

    def _advance(self) -> None:
        self._progress_s = time.monotonic()

    def _open(self) -> RemoteCheckpoints:
        """At the first contact: what is there already needs no sending."""
        if self._remote is None:
            remote = RemoteCheckpoints(open_store(self._note.url, MIRROR_NOTE))
            remote.store.on_progress = self._advance
            remote.store.before_change = partial(self._require_ours, remote.store)
            there = remote.remember()
            for path in step_folders(self._folder.checkpoints):
                if remote.is_same(there.get(path.name), path):
                    self._whole.update([_seal_of(path)])
            self._remote = remote
        return self._remote

    def _look_again(self, remote: RemoteCheckpoints) -> None:
        """Forget what was replaced or removed in the store since it was sent: it is sent once more."""
        there = {item.name: item for item in remote.list()}
        self._whole = {name: seal for name, seal in self._whole.items() if remote.is_unchanged(there.get(name))}
        self._pointed = {name: to for name, to in self._pointed.items() if remote.pointed_at(name) == to}
        files = remote.store.list()
        self._sent = {name: mark for name, mark in self._sent.items() if name in files}
        if MIRROR_NOTE not in files:
            remote.store.put(self._folder.path / MIRROR_NOTE, MIRROR_NOTE)

    def _require_everything(self, remote: RemoteCheckpoints) -> None:
        """After the last file: a store that has lost some of them meanwhile is behind."""
        self._look_again(remote)
        lost = [path.name for path in self._missing()]
        lost += [name for name, to in self._pointers().items() if self._pointed.get(name) != to]
        lost += [name for name in _small_files(self._folder.path) if name not in self._sent]
        if lost:
            raise StoreTrouble(f"{lost[0]} is no longer in the store, though it was sent")

    def _require_ours(self, store: Store) -> None:
        raw = store.read(MIRROR_NOTE)
        theirs = parse_note(raw.decode(errors="replace")) if raw else None
        if theirs is not None and theirs.token != self._note.token:
            raise TakenOver

    # --- Checkpoints

    def _missing(self) -> list[Path]:
        """Checkpoints that the store lacks, in the order they should go: the newest, the best, the others."""
        paths = step_folders(self._folder.checkpoints)
        best = disk.pointed_at(self._folder.checkpoints, "best")
        newest = paths[0] if paths else None
        seals = {path: _seal_of(path) for path in paths}
        arrived = {*self._whole.items(), *self._damaged}
        missing = [path for path in paths if seals[path][1] and seals[path] not in arrived]
        return sorted(missing, key=lambda path: (path != newest, path != best, -step_of(path)))

    def _missing_or_none(self) -> list[Path]:
        """For a message: the disk may be what fails."""
        try:
            return self._missing()
        except (OSError, UnreadableNow):
            return []

    def _send(self, remote: RemoteCheckpoints, path: Path) -> None:
        seal = _seal_of(path)
        is_newest = path == next(iter(step_folders(self._folder.checkpoints)), None)
        try:
            pinned = self._pin(path)
            # Rows up to a checkpoint are on disk before it is: whoever resumes from it must find them.
            self._send_small_files(remote.store, only=self._folder.metrics_jsonl.name)
            there = next((item for item in remote.list() if item.name == path.name), None)
            for _ in remote.send(pinned, there):
                self._advance()
                if self._is_over.is_set():
                    raise StoreTrouble("given up at the end of the run")
        except DamagedCheckpoint as found:
            if path.exists():
                self._damaged.add(seal)
                _tell(f"warning: {path} is damaged on this disk ({found.damage}) and was not mirrored")
            return
        except FileNotFoundError:
            return  # dropped before it was pinned: a newer one is there
        self._whole.update([seal])
        self._must_prune = True
        self._has_sent_newest |= is_newest
        shutil.rmtree(self._pin_of(path), ignore_errors=True)  # never the checkpoint itself
        self._point(remote)
        self._prune(remote)

    def _pin(self, path: Path) -> Path:
        """A name of our own for every file: what is pruned while it is being sent stays until it is sent."""
        pinned = self._pin_of(path)
        shutil.rmtree(pinned, ignore_errors=True)
        pinned.mkdir(parents=True)
        try:
            for file in sorted(path.iterdir()):
                os.link(file, pinned / file.name)
        except FileNotFoundError:
            raise
        except OSError:  # a disk without hard links
            shutil.rmtree(pinned, ignore_errors=True)
            return path
        return pinned

    def _pin_of(self, path: Path) -> Path:
        return self._folder.path / _PINS / path.name

    def _pointers(self) -> dict[str, str]:
        """Where latest and best should point in the store: at what is whole there."""
        targets = {name: disk.pointed_at(self._folder.checkpoints, name) for name in POINTERS}
        return {name: path.name for name, path in targets.items() if path and _seal_of(path) in self._whole.items()}

    def _point(self, remote: RemoteCheckpoints) -> None:
        for pointer, name in self._pointers().items():
            if self._pointed.get(pointer) != name:
                remote.point(pointer, name)
                self._pointed[pointer] = name

    def _prune(self, remote: RemoteCheckpoints) -> None:
        paths = step_folders(self._folder.checkpoints)
        # Not the newest on disk: a store that is behind never has that one, and would never be pruned. Later ones than
        # those on disk are of a line that the run has left.
        sent = [name for name in self._whole if paths and step_of(Path(name)) <= step_of(paths[0])]
        if not self._must_prune or not sent:
            return
        newest = max(sent, key=lambda name: step_of(Path(name)))
        retention = disk.Retention(self._note.keep_last, self._note.keep_best)
        own = {path.name: _state_of(path) for path in paths}
        if not remote.prune(newest, own, retention, went_back=self._has_sent_newest):
            del self._whole[newest]
            if newest not in own:
                return  # dropped here meanwhile: a newer one is on its way
            raise StoreTrouble(f"{newest} is not whole in the store, though it was sent")
        self._must_prune = False

    # --- Small files

    def _send_small_files(self, store: Store, only: str = "") -> None:
        for name, mark in _small_files(self._folder.path).items():
            if self._sent.get(name) != mark and (not only or name == only):
                with suppress(FileNotFoundError):
                    store.put(self._folder.path / name, name)
                    self._sent[name] = mark
                self._advance()

    # --- What people read

    def _stumble(self, error: Exception) -> None:
        self._trouble = " ".join(str(error).split()) or type(error).__name__
        self._since = self._since or _now()
        self._say_behind(self._missing_or_none())
        if not self._is_told and not self._is_closing.is_set():
            self._is_told = True
            _tell(f"warning: {self._note.url} is behind: {self._trouble}; training goes on, and it is tried again")

    def _catch_up(self) -> None:
        self._trouble, self._since = "", ""
        self._say(f"in step{self._newest_in_words()}")
        if self._is_told:
            self._is_told = False
            _tell(f"note: {self._note.url} has caught up{self._newest_in_words()}")

    def _say_behind(self, missing: list[Path]) -> None:
        self._since = self._since or _now()
        reason = f": {self._trouble}" if self._trouble else ""
        self._say(f"behind {_count(len(missing))} since {self._since}{reason}")

    def _say(self, text: str) -> None:
        if text != self._note.says:
            self._note = replace(self._note, says=text)
            with suppress(OSError):  # a full disk, which the run itself tells of
                self._note.write(self._folder.path)

    def _newest_in_words(self) -> str:
        newest = max((step_of(Path(name)) for name in self._whole), default=None)
        return "" if newest is None else f", checkpoints up to step {newest}"

    def _tell_behind(self) -> None:
        missing = self._missing_or_none()
        self._say_behind(missing)
        with suppress(OSError):
            self._folder.update_mirror_status()
        what = f"{_count(len(missing))} did not arrive" if missing else "files did not arrive"
        _tell(
            f"\nwarning: {self._note.url} IS BEHIND: {what}"
            + (f"\n  newest:  step {step_of(missing[0])}, only in {self._folder.path}" if missing else "")
            + (f"\n  reason:  {self._trouble}" if self._trouble else "")
            + f"\n  push it: paceline checkpoints {self._folder.path} --push"
            + "\n           (a rerun with --resume does so too; until then, keep this folder)"
        )


@contextmanager
def mirrored(folder: RunFolder, gives_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Mirror the run folder, if it has a store, for as long as the block lasts."""
    note = read_own_note(folder.path)
    if note is None:
        yield
        return
    mirror = Mirror(folder, note)
    mirror.start()
    try:
        yield
    finally:
        mirror.close(gives_up)


def _small_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything beside the checkpoints that is meant for eyes, with what tells whether it has changed."""
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


def _seal_of(path: Path) -> Seal:
    try:
        return path.name, add_checksum((path / MANIFEST).read_bytes()) or 1
    except OSError:  # dropped meanwhile
        return path.name, 0


def _state_of(path: Path) -> dict[str, Any]:
    """Empty for one that is damaged on this disk: the copy in the store stays all the same."""
    try:
        return read_state(path)
    except DamagedCheckpoint:
        return {}


def _count(checkpoints: int) -> str:
    return "1 checkpoint" if checkpoints == 1 else f"{checkpoints} checkpoints"


def _now() -> str:
    return f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
