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
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoints.format import MANIFEST, DamagedCheckpoint, checksum_of, step_folders, step_of, verify
from paceline.checkpoints.store import Checkpoint, damaged_error, inspect_checkpoint, pointed_at, temporary_folder
from paceline.runs.folder import RunFolder

_log = logging.getLogger("paceline")
_LOOK_S = 0.5
_NAME = "paceline"
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
    step: int
    best_key: str  # of the parcel with the best checkpoint so far; empty: this one, or none yet


@dataclass
class Courier:
    """The main node's: sends every checkpoint that is committed, beside training."""

    folder: RunFolder
    datastore: Datastore
    about: dict[str, Any]
    best_is_latest: bool
    on_sent: Callable[[Parcel, dict[str, Any]], None] | None = None
    sent: dict[str, Parcel] = field(default_factory=dict)  # by identity, in this attempt and before
    history: list[dict[str, Any]] = field(default_factory=list)  # what was sent, for the card
    problem: str = ""  # why the last look sent nothing, if it should have
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """The ranks are gone: send what they committed last, and stop."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.look()
        if self.problem:
            _log.warning("warning: the newest checkpoint did not reach the datastore: %s", self.problem)

    def look(self) -> None:
        """Send the best and the newest checkpoint, if they have not been sent. Trouble is told and tried again."""
        try:
            best = pointed_at(self.folder.checkpoints, "best")
            newest = next(iter(step_folders(self.folder.checkpoints)), None)
            for path in sorted({path for path in (best, newest) if path is not None}, key=step_of):
                if identity(path) not in self.sent:
                    self._send(path, best)
            self.problem = ""
        except (DamagedCheckpoint, FileNotFoundError) as error:
            self.problem = str(error)  # pruned meanwhile, most likely: the next look finds what came after it
        except Exception as error:  # a datastore that stumbles must not end the training
            words = f"{type(error).__name__}: {error}"
            if words != self.problem:
                _log.warning("warning: a checkpoint could not be sent to the datastore: %s", words)
            self.problem = words

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look()

    def _send(self, path: Path, best: Path | None) -> None:
        with tempfile.TemporaryDirectory(prefix="paceline-parcel-") as scratch:
            # A copy: while it travels, training goes on and may prune the original.
            parcel = Path(scratch) / "parcel"
            shutil.copytree(path, parcel / "checkpoints" / path.name, copy_function=_link_or_copy)
            for companion in _COMPANIONS:
                with suppress(FileNotFoundError):
                    shutil.copyfile(self.folder.path / companion, parcel / companion)
            copied = parcel / "checkpoints" / path.name
            verify(copied)
            checkpoint, name = inspect_checkpoint(copied), identity(copied)
            is_best = best is not None and best.name == path.name
            best_key = "" if best is None or is_best else self.sent[identity(best)].key
            metadata = {**describe(checkpoint), **self.about, "is_best": is_best, "best_key": best_key}
            latest = is_best or best is None or not self.best_is_latest
            reference = self.datastore.save(str(parcel), name=_NAME, metadata=metadata, latest=latest)
        sent = Parcel(reference["key"], checkpoint.step, best_key)
        self.sent[name] = sent
        self.history.append({**metadata, "key": sent.key, "latest": latest})
        if self.on_sent is not None:
            self.on_sent(sent, metadata)


def identity(path: Path) -> str:
    """Which checkpoint this is. The step alone does not say: a run that went back saves it anew, with other weights."""
    return f"{path.name}-{checksum_of(path / MANIFEST):08x}"


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a list of checkpoints says of each."""
    state = checkpoint.state
    validation = state.get("validation") or {}
    return {
        "step": checkpoint.step,
        "epoch": checkpoint.step // max(1, int(state["steps_per_epoch"])),
        "val_loss": validation.get("loss"),
        "val_acc": validation.get("accuracy"),
        "world_size": checkpoint.manifest.about.get("world_size"),
    }


def fetch(datastore: Datastore, keys: list[str], folder: RunFolder) -> dict[str, str]:
    """Bring parcels into a run folder, each verified before its checkpoint gets its name.

    Returns the key of each checkpoint's parcel, by the name of its folder.
    """
    folder.create()
    arrived = {}
    for key in keys:
        with tempfile.TemporaryDirectory(prefix="paceline-parcel-") as scratch:
            datastore.load(key, path=scratch)
            for name in _COMPANIONS:
                if (Path(scratch) / name).exists() and not (folder.path / name).exists():
                    shutil.copyfile(Path(scratch) / name, folder.path / name)
            for path in step_folders(Path(scratch) / "checkpoints"):
                _take_in(path, folder.checkpoints)
                arrived[path.name] = key
    return arrived


def _take_in(path: Path, checkpoints: Path) -> None:
    """Files of a local datastore arrive as links into it: what the run keeps are copies."""
    target = checkpoints / path.name
    if target.exists():
        return
    temporary = temporary_folder(checkpoints, step_of(path))
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(path, temporary)
    try:
        verify(temporary)
    except DamagedCheckpoint as found:
        shutil.rmtree(temporary, ignore_errors=True)
        raise damaged_error(path, found) from found
    temporary.rename(target)


def keep_only(checkpoints: Path, names: Collection[str]) -> None:
    """Of a node that only follows: nobody prunes there."""
    for path in step_folders(checkpoints):
        if path.name not in names:
            shutil.rmtree(path, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> str:
    """Committed files are never changed, so a second name is as good as a copy, where the disk allows it."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
    return target
