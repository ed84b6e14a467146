"""Uploads committed checkpoints while training continues: to an object store, or to Metaflow's datastore.

The process that owns the run folder has one `CheckpointUploader`. Its thread compares the folder with the destination
and uploads what is missing. It reads finished files only, so training never waits for it. If the destination fails, the
upload is tried again after growing pauses. The run prints one warning when the destination is behind, and one note when
it has caught up.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Protocol

from paceline.checkpoints.format import MANIFEST, DamagedCheckpoint, add_checksum, step_of
from paceline.errors import OwnerLost
from paceline.runs.folder import RunFolder
from paceline.runs.patience import UnreadableNow
from paceline.runtime.pulse import RunningClock
from paceline.settings.values import STORE_TIMEOUT, read_number

PATIENCE = STORE_TIMEOUT
_PATIENCE_S = 60.0  # at the end of a run: how long a destination may make no progress
_POLL_EVERY_S = 1.0
_LONGEST_PAUSE_S, _LAST_PAUSE_S = 30.0, 1.0
_JOIN_POLL_S = 0.05
_PINS = ".mirror"  # hard links to what is being uploaded, so that pruning does not remove it meanwhile

CheckpointId = tuple[str, int]  # name and checksum of the manifest: a rewound run saves the same step again


class TakenOver(Exception):
    """Another start of the run uploads to the destination now."""


class UploadStopped(OSError):
    """The run ends without waiting for the upload."""


class Progress:
    """When an upload has made progress last. Another thread reads it."""

    def __init__(self) -> None:
        self.last_s = time.monotonic()

    def advance(self) -> None:
        self.last_s = time.monotonic()


class Destination(Protocol):
    """Where checkpoints are uploaded to. Every method may raise any error; it is tried again."""

    name: str  # for messages
    shows_progress: bool  # whether a large upload advances `progress` or yields while it makes progress
    progress: Progress

    def missing(self) -> list[Path]:
        """Checkpoints on disk that are not there, in the order of their upload."""

    def has_changes(self) -> bool:
        """Whether anything else has to be brought up to date. Must not use the network."""

    def open(self, *, is_last: bool) -> None:
        """Before an upload. `is_last`: check that earlier uploads are still there."""

    def upload(self, checkpoint: Path, pinned: Path) -> Iterator[str]:
        """Yields after each file. `pinned` has the files of the checkpoint, which may be pruned meanwhile."""

    def update(self, *, is_last: bool) -> None:
        """Everything beside checkpoints. `is_last`: and check that all of it is there."""

    def record(self, state: str) -> None:
        """For people: how far the upload is."""

    def finish_complete(self) -> None:
        """The run ends, and everything was uploaded."""

    def finish_behind(self) -> str:
        """The run ends, and something was not uploaded. Returns the next steps for the user, as lines of a message."""

    def newest_step(self) -> int | None:
        """Of the checkpoints that are there."""

    def describe(self, error: Exception) -> str:
        """An error on one line."""


class CheckpointUploader:
    """Uploads the checkpoints of one run folder until it is closed."""

    def __init__(self, folder: RunFolder, destination: Destination) -> None:
        self._folder = folder
        self._destination = destination
        self._progress = destination.progress
        self._damaged: set[CheckpointId] = set()  # on this disk
        self._behind_since = ""
        self._error = ""
        self._has_warned = False
        self._is_uploading = self._is_taken_over = self._is_complete = False
        self._is_closing, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, gives_up: Callable[[], bool] = lambda: False) -> bool:
        """Upload the rest, as long as there is progress. Prints and returns whether everything was uploaded."""
        patience_s = read_number(PATIENCE, _PATIENCE_S)
        self._progress.advance()
        clock, progress_s, since_s = RunningClock(), self._progress.last_s, 0.0
        self._is_closing.set()
        while self._thread.is_alive():
            self._thread.join(_JOIN_POLL_S)
            now_s = clock.seconds  # a suspension of this process does not count
            if self._progress.last_s != progress_s or (self._is_uploading and not self._destination.shows_progress):
                progress_s, since_s = self._progress.last_s, now_s
            if gives_up() or now_s - since_s > patience_s:
                break
        self._is_over.set()
        shutil.rmtree(self._folder.path / _PINS, ignore_errors=True)
        if self._is_complete:
            self._destination.finish_complete()
        elif not self._is_taken_over:
            self._report_behind()
        return self._is_complete

    def upload_new(self, *, is_last: bool = False) -> None:
        """Upload what is missing. Without news, it does not use the network."""
        if not (is_last or self._missing() or self._destination.has_changes()):
            return
        self._destination.open(is_last=is_last)
        while missing := self._missing():
            self._record_behind(missing)
            self._upload(missing[0])
        self._destination.update(is_last=False)
        self._record_caught_up()
        if is_last:
            self._destination.update(is_last=True)
            if lost := self._missing():
                raise OSError(f"{lost[0].name} is no longer there, though it was uploaded")

    # --- The thread

    def _run(self) -> None:
        pause_s = _POLL_EVERY_S
        shutil.rmtree(self._folder.path / _PINS, ignore_errors=True)
        while not self._is_over.is_set():
            is_last = self._is_closing.is_set()
            try:
                self.upload_new(is_last=is_last)
                pause_s = _POLL_EVERY_S
                if is_last:
                    self._is_complete = True
                    return
            except OwnerLost:
                self._is_taken_over = True  # the owner reports it
                return
            except TakenOver:
                self._is_taken_over = True
                self._destination.record("another start of this run uploads now")
                where = self._destination.name
                _warn(f"warning: another start of this run writes to {where} now; this one no longer does")
                return
            except Exception as error:  # no error may end the thread silently
                self._record_error(error)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if self._is_closing.is_set():
                self._is_over.wait(_LAST_PAUSE_S if self._error else 0)
            else:
                self._is_closing.wait(pause_s)

    def _missing(self) -> list[Path]:
        return [path for path in self._destination.missing() if id_of(path) not in self._damaged]

    def _upload(self, path: Path) -> None:
        own_id = id_of(path)
        pin = self._folder.path / _PINS / path.name
        self._is_uploading = True
        try:
            for _ in self._destination.upload(path, _pin(path, pin)):
                self._progress.advance()
                if self._is_over.is_set():
                    raise UploadStopped("the run has ended")
        except DamagedCheckpoint as found:
            if path.exists() and not self._is_over.is_set():  # the end of the run removes the pinned files
                self._damaged.add(own_id)
                _warn(f"warning: {path.name} is damaged on this disk ({found.damage}) and was not uploaded")
        except FileNotFoundError:
            if path.exists():
                raise
            # pruned before it was pinned: there is a newer one
        finally:
            self._is_uploading = False
            shutil.rmtree(pin, ignore_errors=True)  # never the checkpoint itself

    # --- Messages

    def _record_error(self, error: Exception) -> None:
        self._error = self._destination.describe(error)
        self._record_behind(self._missing_or_none())
        if not self._has_warned and not self._is_closing.is_set():
            self._has_warned = True
            _warn(f"warning: {self._destination.name} is behind: {self._error}; training continues, with retries")

    def _record_caught_up(self) -> None:
        self._error, self._behind_since = "", ""
        newest = self._destination.newest_step()
        until = "" if newest is None else f", checkpoints up to step {newest}"
        self._destination.record(f"up to date{until}")
        if self._has_warned:
            self._has_warned = False
            _warn(f"note: {self._destination.name} has caught up{until}")

    def _record_behind(self, missing: list[Path]) -> None:
        self._behind_since = self._behind_since or f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}"
        reason = f": {self._error}" if self._error else ""
        self._destination.record(f"behind {_count(missing)} since {self._behind_since}{reason}")

    def _report_behind(self) -> None:
        missing = self._missing_or_none()
        self._record_behind(missing)
        what = f"{_count(missing)} did not arrive" if missing else "files did not arrive"
        _warn(
            f"\nwarning: {self._destination.name} IS BEHIND: {what}"
            + (f"\n  newest:  step {max(map(step_of, missing))}" if missing else "")
            + (f"\n  reason:  {self._error}" if self._error else "")
            + self._destination.finish_behind()
        )

    def _missing_or_none(self) -> list[Path]:
        """For a message: the disk may be what fails."""
        try:
            return self._missing()
        except (OSError, UnreadableNow):
            return []


def _pin(path: Path, pin: Path) -> Path:
    """A second name for every file. A checkpoint that is pruned during its upload stays until the end of it."""
    shutil.rmtree(pin, ignore_errors=True)
    pin.mkdir(parents=True)
    try:
        for file in sorted(path.iterdir()):
            os.link(file, pin / file.name)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without hard links
        return path
    return pin


def id_of(path: Path) -> CheckpointId:
    try:
        return path.name, add_checksum((path / MANIFEST).read_bytes()) or 1
    except OSError:  # pruned meanwhile
        return path.name, 0


def _count(checkpoints: list[Path]) -> str:
    return "1 checkpoint" if len(checkpoints) == 1 else f"{len(checkpoints)} checkpoints"


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
