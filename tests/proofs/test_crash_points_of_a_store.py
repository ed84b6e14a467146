"""Every crash point of uploads to an object store and of fetches from it. The store is fsspec's, in memory: each object
is replaced in one step and durable at once, as in S3."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from harness.crash_points import record_life, try_all
from harness.power_loss import Crash, kills, power_losses
from harness.recorded_disk import Recorder
from harness.run_lives import RunLife, check_rows, check_whole, leftovers_in
from paceline.checkpoints import fetch as fetching
from paceline.checkpoints import mirror, store, uploader
from paceline.checkpoints.fetch import fetch_run, push
from paceline.checkpoints.remote import RemoteCheckpoints
from paceline.runs.folder import RunFolder
from paceline.runs.stores import MirrorNote, Store, open_store, read_note

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # seconds of CPU time, on machines that may be shared

URL = "memory://run"


@pytest.fixture(autouse=True)
def empty_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(uploader, "_JOIN_POLL_S", 0.001)
    for module in (fetching, mirror):  # the recorded disk and a working copy are in different places
        monkeypatch.setattr(module, "read_own_note", read_note)
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


def objects() -> dict[str, bytes]:
    there = open_store(URL, "here")
    return {name: there.read(name) or b"" for name in there.list()}


def set_objects(wanted: dict[str, bytes]) -> None:
    MemoryFileSystem.store.clear()
    there = open_store(URL, "here")
    for name, data in wanted.items():
        there.write(name, data)


@contextmanager
def recorded_store(recorder: Recorder) -> Iterator[None]:
    """Record the changes of the store."""
    recorder.record.store = known = objects()

    def watched(name: str) -> Any:
        real = getattr(Store, name)

        def call(self: Store, *arguments: Any) -> None:
            nonlocal known
            real(self, *arguments)
            now = objects()
            for path in known.keys() | now.keys():
                if known.get(path) != now.get(path):
                    recorder.store_changed(path, now.get(path))
            known = now

        return mock.patch.object(Store, name, call)

    with watched("put"), watched("write"), watched("remove"), watched("copy"):
        yield


def ignore(text: str) -> None:
    pass


def steps_stored() -> set[int]:
    return {item.step for item in RemoteCheckpoints(open_store(URL, "here")).list() if item.is_sealed}


# --- To the store


def mirrored_run(run: Path) -> None:
    life = RunLife(run)
    MirrorNote(URL).write(run)
    for is_best in (True, False):
        life.train(1)
        life.save(is_best=is_best)
    life.close()
    assert push(life.folder, ignore)


def save_and_push(run: Path, recorder: Recorder) -> None:
    """Step 3 is uploaded and is the best. Steps 1 and 2 are dropped on the disk and in the store."""
    with recorded_store(recorder):
        life = RunLife(run)
        life.train(1)
        life.save(is_best=True)
        life.close()
        recorder.mark("saved", {"step": 3})
        assert push(life.folder, ignore)
        recorder.mark("arrived", 3)


def check_store(run: Path, crash: Crash, coming: Any, *, goes_on: bool) -> None:
    set_objects(crash.store)
    sealed = steps_stored()
    assert max(sealed) == 3 if crash.last("arrived") else max(sealed) in (2, 3)
    assert sealed >= {1, 2} or 3 in sealed  # nothing is dropped before its successor is complete

    other = RunFolder(run.parent / "other-machine")
    fetch_run(open_store(URL, "here"), other, "", ignore)
    life = RunLife(other.path)
    assert life.step == max(sealed)
    check_whole(other)
    check_rows(other, life.step)
    life.close()

    life = RunLife(run)  # and on this machine
    assert life.step == 3 if crash.last("saved") else life.step in (2, 3)
    life.close()
    assert push(RunFolder(run), ignore)
    assert max(steps_stored()) == life.step
    assert leftovers_in(RunFolder(run)) == []


def test_no_crash_point_of_a_mirror_round_loses_a_checkpoint_in_the_store(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another machine finds the newest uploaded checkpoint with its metrics. This machine uploads the rest again."""
    record = record_life(disk, save_and_push, mirrored_run)
    try_all(disk, kills(record), record, check_store).require_none(at_least=50)


def test_power_loss_during_a_mirror_round_loses_no_checkpoint(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same after losses on this machine. The store loses nothing."""
    record = record_life(disk, save_and_push, mirrored_run)
    sending = [crash for crash in power_losses(record) if crash.last("saved")]
    # Each state needs a complete mirror round, so the test uses every sixteenth of some hundreds.
    try_all(disk, sending[::16], record, check_store).require_none(at_least=20)


# --- From the store


def fetch(run: Path, recorder: Recorder) -> None:
    fetch_run(open_store(URL, "here"), RunFolder(run), "", ignore)
    recorder.mark("fetched", 2)


def stored_run(run: Path) -> None:
    """The store has steps 1 (the best) and 2; this machine has nothing."""
    mirrored_run(run)
    shutil.rmtree(run)


def stored_run_and_an_old_copy(run: Path) -> None:
    """The store has steps 1 and 2; this machine has step 1 only."""
    mirrored_run(run)
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    store.point(run / "checkpoints", "latest", run / "checkpoints" / "step-00000001")
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(rows[0])


def check_fetch(run: Path, crash: Crash, coming: Any, *, goes_on: bool) -> None:
    """After another fetch, all files are there."""
    if run.is_dir():
        check_whole(RunFolder(run))
    fetch_run(open_store(URL, "here"), RunFolder(run), "", ignore)  # as every start does
    life = RunLife(run)
    assert life.step == 2
    assert life.best_step == 1
    assert check_whole(life.folder) == {1, 2}
    check_rows(life.folder, 2)
    assert leftovers_in(life.folder) == []
    life.close()


@pytest.mark.parametrize("before", [stored_run, stored_run_and_an_old_copy])
@pytest.mark.parametrize("crashes", [kills, power_losses])
def test_no_crash_point_of_a_fetch_leaves_a_partial_run(
    disk: Path, before: Any, crashes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next start fetches what is missing: checkpoints, the best one and the metrics before them."""
    record = record_life(disk, fetch, before)
    states = list(crashes(record))
    step = 1 if crashes is kills else 3  # every third power loss: each needs a fetch and a restart
    try_all(disk, states[::step], record, check_fetch).require_none(at_least=15)
