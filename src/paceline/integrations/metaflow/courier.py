"""Checkpoints on their way between a run folder and Metaflow's datastore. No torch.

What the datastore holds is what a retry goes on from, on whatever machine with an empty disk. A parcel is one
committed checkpoint with the metrics up to it; it is verified to the last bit before it leaves, and again after it
arrives. The best checkpoint travels once, as its own parcel, and later parcels name it.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoints.format import (
    LARGEST_JSON_BYTES,
    MANIFEST,
    DamagedCheckpoint,
    checksum_of,
    step_folders,
    step_of,
    verify,
)
from paceline.checkpoints.store import (
    Checkpoint,
    damaged_error,
    inspect_checkpoint,
    pointed_at,
    take_in,
    temporary_folder,
)
from paceline.launch.child_guard import without_folder
from paceline.runs.drafts import draft_of
from paceline.runs.epoch_clock import EpochClock
from paceline.runs.folder import RunFolder, flush
from paceline.settings.small_files import read_small

_log = logging.getLogger("paceline")
_LOOK_S = 0.5
PARCEL_NAME = "paceline"
# Beside the checkpoint itself: what a run folder needs to go on as if it had always been there.
_COMPANIONS = ("metrics.jsonl", "faults.jsonl", "failures.jsonl")


class Datastore(Protocol):
    """What we use of Metaflow's `current.checkpoint`."""

    def save(self, path: str, *, name: str, metadata: dict[str, Any], latest: bool) -> dict[str, Any]: ...

    def load(self, reference: str, path: str) -> Any: ...


@dataclass(frozen=True)
class Parcel:
    """One checkpoint in the datastore."""

    key: str
    best_key: str  # of the parcel with the best checkpoint so far; empty: this one, or none yet


@dataclass
class Courier:
    """Of one run folder: sends every checkpoint that is committed there, beside training, and brings others in."""

    folder: RunFolder
    datastore: Datastore
    about: dict[str, Any]
    best_is_latest: bool = False
    on_sent: Callable[[Parcel], None] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)  # what was sent, for the card
    problem: str = ""  # why the last look sent nothing, if it should have
    _stored: dict[str, str] = field(default_factory=dict)  # keys of what is in the datastore, by identity
    _lock: threading.Lock = field(default_factory=threading.Lock)  # nothing that comes in is sent back
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """The ranks are gone: send what they committed last, and stop."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        self.look()
        if self.problem:
            _log.warning("warning: the newest checkpoint did not reach the datastore: %s", self.problem)

    def look(self) -> None:
        """Send the best and the newest checkpoint, if they have not been sent. Trouble is told and tried again."""
        try:
            with self._lock:
                self._look()
            self.problem = ""
        except (DamagedCheckpoint, FileNotFoundError) as error:
            # Pruned meanwhile, most likely: the next look finds what came after it.
            self.problem = self._in_words(str(error))
        except Exception as error:  # a datastore that stumbles must not end the training
            words = self._in_words(f"{type(error).__name__}: {error}")
            if words != self.problem:
                _log.warning("warning: a checkpoint could not be sent to the datastore: %s", words)
            self.problem = words

    def _in_words(self, text: str) -> str:
        return without_folder(text, self.folder.path.parent)

    def fetch(self, keys: list[str]) -> list[str]:
        """Bring parcels into the run folder, each verified before its checkpoint gets its name. Returns the names."""
        self.folder.create()
        names: list[str] = []
        for key in keys:
            with tempfile.TemporaryDirectory(prefix="paceline-parcel-") as scratch, self._lock:
                self.datastore.load(key, path=scratch)
                paths = step_folders(Path(scratch) / "checkpoints")
                # The history up to the newest checkpoint, and before it: a checkpoint is committed last.
                if max((path.name for path in paths), default="") >= max(names, default=""):
                    self._take_companions(Path(scratch))
                for path in paths:
                    self._stored[identity(_take_in(path, self.folder.checkpoints))] = key
                    names.append(path.name)
        return names

    def _take_companions(self, scratch: Path) -> None:
        """The metrics are those of the checkpoint. Faults and failures are this node's own, once it has any."""
        for name in _COMPANIONS:
            target = self.folder.path / name
            if (scratch / name).exists() and (name == self.folder.metrics_jsonl.name or not target.exists()):
                draft = draft_of(target)  # half a file must not look like one
                shutil.copyfile(scratch / name, draft)
                flush(draft)
                draft.replace(target)
        flush(self.folder.path)

    def follow(self, parcel: Parcel) -> None:
        """Another node's ranks have saved: what they may ask this node's for must be here, and nothing else."""
        names = self.fetch([key for key in (parcel.key, parcel.best_key) if key])
        for path in step_folders(self.folder.checkpoints):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look()

    def _look(self) -> None:
        best = pointed_at(self.folder.checkpoints, "best")
        newest = next(iter(step_folders(self.folder.checkpoints)), None)
        for path in sorted({path for path in (best, newest) if path is not None}, key=step_of):
            if identity(path) not in self._stored:
                self._send(path, best)

    def _send(self, path: Path, best: Path | None) -> None:
        with tempfile.TemporaryDirectory(prefix="paceline-parcel-") as scratch:
            # A copy: while it travels, training goes on and may prune the original.
            copied = Path(scratch) / "checkpoints" / path.name
            shutil.copytree(path, copied, copy_function=_link_or_copy)
            for companion in _COMPANIONS:
                with suppress(FileNotFoundError):
                    shutil.copyfile(self.folder.path / companion, Path(scratch) / companion)
            verify(copied)
            checkpoint, name = inspect_checkpoint(copied), identity(copied)
            is_best = best is not None and best.name == path.name
            best_key = "" if best is None or is_best else self._stored[identity(best)]
            metadata = {**describe(checkpoint), **self.about, "is_best": is_best, "best_key": best_key}
            latest = is_best or best is None or not self.best_is_latest
            key = self.datastore.save(scratch, name=PARCEL_NAME, metadata=metadata, latest=latest)["key"]
        self._stored[name] = key
        self.history.append({**metadata, "key": key, "latest": latest})
        if self.on_sent is not None:
            self.on_sent(Parcel(key, best_key))


def identity(path: Path) -> str:
    """Which checkpoint this is. The step alone does not say: a run that went back saves it anew, with other weights."""
    return f"{path.name}-{checksum_of(path / MANIFEST):08x}"


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a list of checkpoints says of each."""
    state = checkpoint.state
    validation = state.get("validation") or {}
    clock = EpochClock.from_json(state)
    return {
        "step": checkpoint.step,
        "epoch": clock.locate(checkpoint.step)[0] if clock else None,
        "val_loss": validation.get("loss"),
        "val_acc": validation.get("accuracy"),
        "world_size": checkpoint.manifest.about.get("world_size"),
    }


def _take_in(path: Path, checkpoints: Path) -> Path:
    """Files of a local datastore arrive as links into it: what the run keeps are copies."""
    target = checkpoints / path.name
    # Not by its identity: files of a local datastore are links, which a checkpoint must not have.
    manifests = [read_small(folder / MANIFEST, LARGEST_JSON_BYTES) for folder in (path, target) if folder.exists()]
    if len(manifests) == 2 and manifests[0] == manifests[1]:
        return target
    temporary = temporary_folder(checkpoints, step_of(path))
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(path, temporary)
    try:
        return take_in(temporary)
    except DamagedCheckpoint as found:
        shutil.rmtree(temporary, ignore_errors=True)
        raise damaged_error(path, found) from found


def _link_or_copy(source: str, target: str) -> str:
    """Committed files are never changed, so a second name is as good as a copy, where the disk allows it."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
    return target
