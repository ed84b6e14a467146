"""The crash point tests detect faults that are injected into a save."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.crash_points import check_restart, record_life, try_all
from harness.power_loss import Crash, kills, power_losses
from harness.recorded_disk import Record, Sync
from paceline.checkpoints import store
from paceline.checkpoints.manager import CheckpointManager
from proofs.saves import SAVES

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # seconds of CPU time, on machines that may be shared

# --- Missing fsyncs


def without_fsync(record: Record, inode: int) -> Record:
    """The record of code that never calls fsync for one file or folder."""
    operations = enumerate(record.operations)
    return record.without(
        *(i for i, operation in operations if isinstance(operation, Sync) and operation.inode == inode)
    )


def key_of(crash: Crash) -> Any:
    return tuple(crash.tree.items()), len(crash.reported)


def loses_something(disk: Path, record: Record, known: set[Any]) -> bool:
    """Whether a restart loses data in one of the states that the complete record does not have."""
    new = (crash for crash in power_losses(record) if key_of(crash) not in known)
    return any(try_all(disk, [crash], record, check_restart).faults for crash in new)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # restarts that fail close nothing
@pytest.mark.parametrize("name", ["first", "with a prune"])
def test_a_missing_fsync_is_detected(disk: Path, name: str) -> None:
    """Every fsync is necessary: without those of one file or folder, some power loss loses data."""
    record = record_life(disk, *SAVES[name])
    known = {key_of(crash) for crash in power_losses(record)}
    synced = dict.fromkeys(operation.inode for operation in record.operations if isinstance(operation, Sync))
    # Status, data.json and process records are written again. Without the records a restart only waits longer.
    made_again = ("run/.status.json", "run/.data.json", "run/.members")
    synced = {inode: None for inode in synced if not record.names[inode].startswith(made_again)}
    spare = [record.names[inode] for inode in synced if not loses_something(disk, without_fsync(record, inode), known)]
    # In later saves the name of the run folder is durable.
    assert spare == ([] if name == "first" else ["."])


# --- Wrong order


def named_before_it_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = store._seal_folder

    def commit(temporary: Path, *arguments: Any) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(store, "flush", lambda path: None)
            seal(temporary, *arguments)
        final = store._give_name(temporary)
        for path in [*final.iterdir(), final]:
            store.flush(path)
        return final

    monkeypatch.setattr(store, "commit", commit)


def pruned_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = CheckpointManager._commit

    def prune_first(self: CheckpointManager, *arguments: Any) -> Path:
        for path in store.step_folders(self._folder):
            store._rename(path, ".tmp-old-")
        return commit(self, *arguments)

    monkeypatch.setattr(CheckpointManager, "_commit", prune_first)


def pruned_without_losing_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_rename", lambda path, prefix: path)


def written_under_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def temporary_folder(folder: Path, step: int) -> Path:
        return folder / f"step-{step:08}"

    def commit(folder: Path, *arguments: Any) -> Path:
        store._seal_folder(folder, *arguments)
        store.flush(folder.parent)
        return folder

    monkeypatch.setattr(store, "temporary_folder", temporary_folder)
    monkeypatch.setattr(store, "commit", commit)


def the_old_one_deleted_before_the_new_one_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rename = store._rename

    def rename_and_delete(path: Path, prefix: str) -> Path:
        target = rename(path, prefix)
        store.shutil.rmtree(target)
        return target

    monkeypatch.setattr(store, "_rename", rename_and_delete)


def pointed_at_before_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    give_name = store._give_name

    def point_first(temporary: Path) -> Path:
        final = temporary.with_name(temporary.name.removeprefix(".tmp-"))
        store.point(final.parent, "latest", final)
        return give_name(temporary)

    monkeypatch.setattr(store, "_give_name", point_first)


FAULTS: dict[str, tuple[str, Any, Callable[[pytest.MonkeyPatch], None]]] = {
    "named before it is flushed": ("with a prune", power_losses, named_before_it_is_flushed),
    "pruned before the commit": ("with a prune", kills, pruned_before_the_commit),
    "pruned without losing the name": ("with a prune", kills, pruned_without_losing_the_name),
    "written under its own name": ("with a prune", kills, written_under_its_own_name),
    "replaced by deleting first": ("same step again", kills, the_old_one_deleted_before_the_new_one_is_there),
    "pointed at before it is there": ("with a prune", kills, pointed_at_before_it_is_there),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_in_the_wrong_order_is_detected(disk: Path, fault: str) -> None:
    """The crash point tests can fail."""
    name, crashes, break_code = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        story, before = SAVES[name]
        record = record_life(disk, story, before, break_code=partial(break_code, patch))
    assert any(try_all(disk, [crash], record, check_restart).faults for crash in reversed(list(crashes(record))))
