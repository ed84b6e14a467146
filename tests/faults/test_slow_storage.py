"""Fault 18: storage with the delays and errors of a network file system. A fake: real calls with added delays."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.ranks import make_world
from paceline.checkpoints import store
from paceline.checkpoints.format import step_folders, step_of, verify
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention, find_newest, open_checkpoint, read_verified
from paceline.errors import CheckpointError

RENAME_S, FSYNC_S, STALE_S = 3.0, 1.0, 2.0
MOST_STALL_S = 0.5


def open_manager(folder: Path, *, is_async: bool = False) -> CheckpointManager:
    return CheckpointManager(
        folder, make_world(0, 1), is_sharded=False, retention=Retention(keep_last=2), is_async=is_async
    )


def save(manager: CheckpointManager, step: int) -> None:
    state = {"step": step, "keep": False, "validation": None}
    manager.save({"model": {"w": torch.full((1000,), float(step))}}, state, {"step": step}, is_best=step % 2 == 0)


class FakeNetwork:
    """Real system calls with delays or single failures. Calls are recorded in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.delays: dict[str, float] = {}
        self.gates: dict[str, threading.Event] = {}  # a call waits until its gate is opened
        self.failures: dict[str, list[int]] = {}  # pending errors
        self.fired: list[str] = []
        self.done_first: set[str] = set()  # calls that succeed but report a failure, as NFS may
        self._patch = monkeypatch
        for name in ("rename", "replace", "fsync", "write", "scandir"):
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            target = Path(arguments[-1]).name if name in ("rename", "replace") else ""
            self.calls.append(f"{name} {target}".strip())
            if name in self.gates:
                self.gates[name].wait()
            time.sleep(self.delays.get(name, 0.0))  # not a synchronisation: this is the delay
            if self.failures.get(name):
                number = self.failures[name].pop(0)
                self.fired.append(name)
                if name in self.done_first:
                    call(*arguments, **named)
                raise OSError(number, os.strerror(number))
            return call(*arguments, **named)

        return wrapped


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> FakeNetwork:
    return FakeNetwork(monkeypatch)


@pytest.fixture
def quick_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RETRY_PAUSE_S", 0.01)


def check_newest(folder: Path, step: int) -> None:
    newest, reports = find_newest(folder)
    assert newest is not None
    assert (newest.step, reports) == (step, [])
    assert open_checkpoint(folder / "latest").step == step
    for path in step_folders(folder):
        verify(path)
    assert not list(folder.glob(".tmp-*"))


def check_stall(network: FakeNetwork, folder: Path, rename_s: float, most_stall_s: float) -> None:
    manager = open_manager(folder, is_async=True)
    save(manager, 1)
    manager.wait()
    before = manager.stall_s
    network.delays["rename"], network.gates["rename"] = rename_s, threading.Event()
    started = time.monotonic()
    save(manager, 2)
    stall_s = manager.stall_s - before
    assert 0 < stall_s <= min(most_stall_s, time.monotonic() - started)
    newest, _ = find_newest(folder)  # meanwhile, a reader sees the checkpoint before
    assert newest is not None
    assert newest.step == 1
    network.gates["rename"].set()
    while manager.is_saving:
        time.sleep(0.01)
    took_s = time.monotonic() - started
    assert took_s >= rename_s  # the storage was slow
    assert rename_s <= manager.last_save_s <= took_s
    manager.wait()
    assert manager.stall_s - before <= most_stall_s
    check_newest(folder, 2)


def test_fake_slow_rename_does_not_block_training(network: FakeNetwork, tmp_path: Path) -> None:
    check_stall(network, tmp_path, 0.6, MOST_STALL_S)


@pytest.mark.faults
def test_fake_rename_of_three_seconds_and_flush_of_one_do_not_block_training(
    network: FakeNetwork, tmp_path: Path
) -> None:
    network.delays["fsync"] = FSYNC_S
    check_stall(network, tmp_path, RENAME_S, MOST_STALL_S)


def test_a_save_that_waits_for_the_save_before_counts_as_a_stall(network: FakeNetwork, tmp_path: Path) -> None:
    manager = open_manager(tmp_path, is_async=True)
    network.delays["rename"] = 0.3
    save(manager, 1)
    save(manager, 2)
    assert manager.stall_s >= 0.3
    manager.wait()
    assert manager.stall_s >= 0.6
    check_newest(tmp_path, 2)


def test_a_checkpoint_is_flushed_before_it_gets_its_name(network: FakeNetwork, tmp_path: Path) -> None:
    manager = open_manager(tmp_path)
    for step in (1, 2, 3):
        network.calls.clear()
        save(manager, step)
    calls = [call for call in network.calls if not call.startswith(("write", "scandir"))]
    assert calls == [
        *("fsync", "fsync", "fsync", "fsync"),  # payload, state, manifest, their folder
        *("rename step-00000003", "fsync"),
        *("replace latest", "fsync"),
        *("rename .tmp-old-step-00000001", "fsync"),  # only now
    ]
    check_newest(tmp_path, 3)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
@pytest.mark.parametrize("call", ["rename", "replace", "fsync", "write", "scandir"])
@pytest.mark.usefixtures("quick_retry")
def test_fake_storage_that_fails_once_is_retried(
    network: FakeNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, number: int
) -> None:
    manager = open_manager(tmp_path)
    save(manager, 1)
    network.failures[call] = [number]
    save(manager, 2)
    assert network.fired == [call]
    assert manager._failures_in_a_row == 0
    (warning,) = caplog.messages
    assert f"{os.strerror(number)}; trying once more in" in warning
    check_newest(tmp_path, 2)


@pytest.mark.parametrize("is_again", [False, True], ids=["new step", "same step"])
@pytest.mark.usefixtures("quick_retry")
def test_fake_rename_that_succeeds_but_reports_a_failure(network: FakeNetwork, tmp_path: Path, is_again: bool) -> None:
    manager = open_manager(tmp_path)
    save(manager, 1)
    step = 1 if is_again else 2
    network.done_first.add("rename")
    network.failures["rename"] = [errno.EIO]
    save(manager, step)
    assert network.fired == ["rename"]
    assert manager._failures_in_a_row == 0
    check_newest(tmp_path, step)


@pytest.mark.usefixtures("quick_retry")
def test_fake_storage_that_fails_twice_loses_one_checkpoint(
    network: FakeNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = open_manager(tmp_path)
    save(manager, 1)
    network.failures["fsync"] = [errno.EIO, errno.EIO]
    save(manager, 2)
    assert network.fired == ["fsync", "fsync"]
    assert "a checkpoint could not be saved" in caplog.messages[-1]
    check_newest(tmp_path, 1)
    save(manager, 3)
    check_newest(tmp_path, 3)


@pytest.mark.usefixtures("quick_retry")
def test_fake_storage_that_cannot_drop_an_old_checkpoint_saves_the_new_one(
    network: FakeNetwork, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    manager = open_manager(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(store, "prune", fail)
        save(manager, 1)
    assert "older checkpoints could not be dropped: Input/output error" in caplog.text
    assert manager._failures_in_a_row == 0
    check_newest(tmp_path, 1)


@pytest.mark.usefixtures("quick_retry")
def test_a_reader_reads_again_before_it_reports_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = open_manager(tmp_path)
    for step in (1, 2):
        save(manager, step)
    opened = os.open
    fired: list[Any] = []

    def stale_once(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).endswith("step-00000002/model.safetensors") and not fired:
            fired.append(path)
            raise OSError(errno.ESTALE, "Stale file handle")
        return opened(path, *rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", stale_once)
        check_newest(tmp_path, 2)  # not set aside
    assert len(fired) == 1
    assert "Stale file handle; trying again" in caplog.text


# --- Listings that are older than the folder --------------------------------------------------------------------------


class StaleListing:
    """Returns the names of an earlier time."""

    def __init__(self, names: list[os.DirEntry[str]]) -> None:
        self._names = names

    def __enter__(self) -> Iterator[os.DirEntry[str]]:
        return iter(self._names)

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return iter(self._names)

    def close(self) -> None:
        pass


def list_from_memory(monkeypatch: pytest.MonkeyPatch, folder: Path, stale_s: float) -> list[float]:
    """Listings of this folder are up to `stale_s` old from now on. Returns the ages of the listings."""
    scandir = os.scandir
    remembered: tuple[float, list[os.DirEntry[str]]] | None = None
    ages: list[float] = []

    def scan(path: Any = ".") -> Any:
        nonlocal remembered
        if isinstance(path, int) or Path(path) != folder:  # a descriptor: an open folder that is being removed
            return scandir(path)
        now = time.monotonic()
        if remembered is None or now - remembered[0] > stale_s:
            with scandir(path) as entries:
                remembered = (now, list(entries))
        ages.append(now - remembered[0])
        return StaleListing(remembered[1])

    monkeypatch.setattr(os, "scandir", scan)
    return ages


def test_fake_stale_listing_a_reader_finds_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_manager(tmp_path)
    ages = list_from_memory(monkeypatch, tmp_path, STALE_S)
    for step in range(1, 9):  # saves within the age of a listing: it shows dropped checkpoints, and not the new one
        save(manager, step)
        assert manager._failures_in_a_row == 0
        newest, reports = find_newest(tmp_path)
        assert newest is not None
        assert (newest.step, reports) == (step, [])
    assert max(ages) > 0.0
    monkeypatch.undo()
    assert step_of(step_folders(tmp_path)[0]) == 8
    save(manager, 9)  # with current listings, the remaining old ones are dropped
    check_newest(tmp_path, 9)
    assert [step_of(path) for path in step_folders(tmp_path)] == [9, 8]


@pytest.mark.parametrize("is_rewound", [False, True])
def test_fake_stale_listing_missing_checkpoints_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_rewound: bool
) -> None:
    manager = open_manager(tmp_path)
    for step in (2, 4, 6):
        save(manager, step)
    if is_rewound:  # the rewind has set step 6 aside; the next save drops it
        manager.rewind_to(4)
    list_from_memory(monkeypatch, tmp_path, STALE_S)
    for _ in range(2):  # the second save still lists what the first has dropped or renamed
        save(manager, 5)
    save(manager, 7)
    assert (manager._failures_in_a_row, caplog.messages) == (0, [])
    monkeypatch.undo()
    newest, _ = find_newest(tmp_path)
    assert newest is not None
    assert newest.step == 7


def test_a_rank_waits_until_it_sees_a_checkpoint_that_another_rank_has_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(open_manager(tmp_path), 1)
    final = tmp_path / "step-00000001"
    hidden = final.rename(tmp_path / "not seen yet")
    looks = []

    def appear(_: float) -> None:  # replaces the pause between two reads
        looks.append(final.exists())
        if len(looks) == 3:
            hidden.rename(final)

    monkeypatch.setattr(store.time, "sleep", appear)
    assert read_verified(final).step == 1
    assert looks == [False, False, False]


def test_a_rank_that_never_sees_the_checkpoint_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SIGHT_S", 0.05)
    with pytest.raises(CheckpointError, match="damaged and was not used"):
        read_verified(tmp_path / "step-00000001")
