"""Checkpoints in Metaflow's datastore. The leader uploads them; retries and nodes with their own disk fetch them.

One upload is one committed checkpoint with the metrics up to it. It is verified before the upload and after a fetch.
The best checkpoint is uploaded once, and later uploads name its key. No torch.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoints.format import LARGEST_JSON_BYTES, MANIFEST, DamagedCheckpoint, step_folders, step_of, verify
from paceline.checkpoints.store import (
    Checkpoint,
    commit_copy,
    damaged_error,
    inspect_checkpoint,
    pointed_at,
    temporary_folder,
)
from paceline.checkpoints.uploader import CheckpointId, Progress, id_of
from paceline.launch.child_guard import without_folder
from paceline.launch.gang_messages import Upload
from paceline.runs.drafts import draft_of
from paceline.runs.epoch_clock import EpochClock
from paceline.runs.folder import RunFolder, flush
from paceline.settings.small_files import read_small

CHECKPOINT_NAME = "paceline"  # in the datastore
# Files beside the checkpoint that a run folder needs to continue.
_OF_NODE = ("faults.jsonl", "failures.jsonl")
_COMPANIONS = ("metrics.jsonl", "steps.f64", "checkpoints.jsonl", *_OF_NODE)


class CurrentCheckpoint(Protocol):
    """What we use of Metaflow's `current.checkpoint`."""

    def save(self, path: str, *, name: str, metadata: dict[str, Any], latest: bool) -> dict[str, Any]: ...

    def load(self, reference: str, path: str) -> Any: ...


class MetaflowDatastore:
    """The checkpoints of one run folder in the datastore. A `Destination` of `CheckpointUploader`."""

    name = "Metaflow's datastore"
    shows_progress = False  # `save` is one call

    def __init__(
        self,
        folder: RunFolder,
        checkpoint: CurrentCheckpoint,
        about: dict[str, Any],
        *,
        best_is_latest: bool = False,
        on_upload: Callable[[Upload], None] = lambda upload: None,
    ) -> None:
        self.progress = Progress()
        self.history: list[dict[str, Any]] = []  # uploads, for the card
        self._folder = folder
        self._checkpoint = checkpoint
        self._about = about
        self._best_is_latest = best_is_latest
        self._on_upload = on_upload
        self._keys: dict[CheckpointId, str] = {}  # of checkpoints that are in the datastore

    # --- Uploads

    def missing(self) -> list[Path]:
        """The best and the newest, in the order of their steps: the newest names the key of the best."""
        newest = next(iter(step_folders(self._folder.checkpoints)), None)
        paths = {path for path in (self._best(), newest) if path is not None}
        return [path for path in sorted(paths, key=step_of) if id_of(path)[1] and id_of(path) not in self._keys]

    def upload(self, checkpoint: Path, pinned: Path) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix=".paceline-upload-", dir=self._folder.path.parent) as scratch:
            copy = Path(scratch) / "checkpoints" / checkpoint.name
            shutil.copytree(pinned, copy, copy_function=_link_or_copy)
            for companion in _COMPANIONS:
                with suppress(FileNotFoundError):
                    shutil.copyfile(self._folder.path / companion, Path(scratch) / companion)
            verify(copy)
            own_id, best = id_of(copy), self._best()
            is_best = best is not None and best.name == checkpoint.name
            best_key = "" if best is None or is_best else self._keys.get(id_of(best), "")
            metadata = {**_describe(inspect_checkpoint(copy)), **self._about, "is_best": is_best, "best_key": best_key}
            latest = is_best or best is None or not self._best_is_latest
            key = self._checkpoint.save(scratch, name=CHECKPOINT_NAME, metadata=metadata, latest=latest)["key"]
        self._keys[own_id] = key
        self.history.append({**metadata, "key": key, "latest": latest})
        self._on_upload(Upload(key, best_key))
        yield checkpoint.name

    def newest_step(self) -> int | None:
        return max((step_of(Path(name)) for name, _ in self._keys), default=None)

    def describe(self, error: Exception) -> str:
        """Without the run folder, which is temporary."""
        return without_folder(f"{type(error).__name__}: {error}", self._folder.path.parent)

    def has_changes(self) -> bool:
        return False

    def open(self, *, is_last: bool) -> None:
        return

    def update(self, *, is_last: bool) -> None:
        return

    def record(self, state: str) -> None:
        return

    def finish_complete(self) -> None:
        return

    def finish_behind(self) -> str:
        return ""

    def _best(self) -> Path | None:
        return pointed_at(self._folder.checkpoints, "best")

    # --- Fetches

    def fetch(self, keys: list[str]) -> list[str]:
        """Download checkpoints into the run folder. Each gets its name after it is verified. Returns the names."""
        self._folder.create()
        names: list[str] = []
        for key in keys:
            with tempfile.TemporaryDirectory(prefix="paceline-fetch-") as scratch:
                self._checkpoint.load(key, path=scratch)
                paths = step_folders(Path(scratch) / "checkpoints")
                # The metrics are those of the newest checkpoint. They come before it: a checkpoint is committed last.
                if max((path.name for path in paths), default="") >= max(names, default=""):
                    self._take_companions(Path(scratch))
                for path in paths:
                    self._keys[id_of(_commit_copy(path, self._folder.checkpoints))] = key  # it is not uploaded again
                    names.append(path.name)
        return names

    def replace_by(self, upload: Upload) -> None:
        """On a node with its own disk: have the checkpoints that the leader has, and no others."""
        names = self.fetch([key for key in (upload.key, upload.best_key) if key])
        for path in step_folders(self._folder.checkpoints):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def _take_companions(self, scratch: Path) -> None:
        """The metrics belong to the checkpoint. Existing faults and failures are this node's own, and stay."""
        for name in _COMPANIONS:
            target = self._folder.path / name
            if (scratch / name).exists() and (name not in _OF_NODE or not target.exists()):
                draft = draft_of(target)  # an incomplete file must not have the final name
                shutil.copyfile(scratch / name, draft)
                flush(draft)
                draft.replace(target)
        flush(self._folder.path)


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """For lists of checkpoints."""
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


def _commit_copy(path: Path, checkpoints: Path) -> Path:
    """Copy a fetched checkpoint. A local datastore provides links, which a checkpoint must not contain."""
    target = checkpoints / path.name
    manifests = [read_small(folder / MANIFEST, LARGEST_JSON_BYTES) for folder in (path, target) if folder.exists()]
    if len(manifests) == 2 and manifests[0] == manifests[1]:
        return target
    temporary = temporary_folder(checkpoints, step_of(path))
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(path, temporary)
    try:
        return commit_copy(temporary)
    except DamagedCheckpoint as found:
        shutil.rmtree(temporary, ignore_errors=True)
        raise damaged_error(path, found) from found


def _link_or_copy(source: str, target: str) -> str:
    """Committed files never change, so a hard link is enough where the disk has them."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
    return target
