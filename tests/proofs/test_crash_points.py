"""Every crash point of the operations on a run folder: a restart finds the newest reported checkpoint, and all others
that are still kept. The crash model is in harness/power_loss.py."""

from __future__ import annotations

import errno
import fcntl
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from harness.crash_points import Outcome, check_restart, record_life, try_all
from harness.power_loss import Crash, kills, make_folder, power_losses
from harness.ranks import make_world
from harness.recorded_disk import Record, Recorder
from harness.run_lives import RunLife, check_whole
from paceline.checkpoints import manager as manager_module
from paceline.checkpoints import store
from paceline.checkpoints.format import verify
from paceline.checkpoints.store import Retention
from paceline.runs import lock
from paceline.runs.folder import RunFolder
from paceline.runs.owner import LOCK, OWNER_FILE, new_owner
from proofs.saves import SAVES, saved

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # seconds of CPU time, on machines that may be shared

ALL_THREE = Retention(keep_last=3, keep_best=1)


# --- Saves and prunes


@pytest.mark.parametrize("name", SAVES)
def test_a_kill_at_any_point_of_a_save_loses_no_reported_checkpoint(disk: Path, name: str) -> None:
    """A restart finds the newest checkpoint that was reported and every other one that is kept, with all metrics."""
    record = record_life(disk, *SAVES[name])
    try_all(disk, kills(record), record, check_restart).require_none(at_least=20)


@pytest.mark.parametrize("name", [name for name in SAVES if name != "with a prune"])  # a better checkpoint also prunes
def test_power_loss_at_any_point_of_a_save_loses_no_reported_checkpoint(disk: Path, name: str) -> None:
    """The same after every allowed loss of what was not fsynced."""
    record = record_life(disk, *SAVES[name])
    try_all(disk, power_losses(record), record, check_restart).require_none(at_least=200)


@pytest.mark.parametrize("name", ["better than before", "same step again"])
def test_a_second_crash_at_any_point_of_the_restart_loses_no_reported_checkpoint(disk: Path, name: str) -> None:
    """A second crash loses as little as one crash."""
    record = record_life(disk, *SAVES[name])
    total = Outcome()
    for number, crash in enumerate(distinct_checkpoints(kills(record))[::2]):
        folder = disk / f"first-{number}"
        folder.mkdir()

        def left_by_first_crash(run: Path, crash: Crash = crash) -> None:
            run.parent.rmdir()
            make_folder(crash.tree, run.parent)

        def restart(run: Path, recorder: Recorder, crash: Crash = crash) -> None:
            recorder.mark("saved", crash.last("saved"))
            RunLife(run).close()

        second = record_life(folder, restart, left_by_first_crash)
        coming = coming_after(crash, record)
        try_all(folder, kills(second), second, check_restart, coming=coming, total=total)
        shutil.rmtree(folder)
    total.require_none(at_least=100)


def distinct_checkpoints(crashes: Any) -> list[Crash]:
    """One crash for each state of the checkpoints folder."""
    found: dict[Any, Crash] = {}
    for crash in crashes:
        inside = tuple(item for item in crash.tree.items() if item[0].startswith("run/checkpoints"))
        found.setdefault((inside, len(crash.reported)), crash)
    return [crash for crash in found.values() if crash.last("saved")]


def coming_after(crash: Crash, record: Record) -> Any:
    reports = [operation.value for operation in record.operations if getattr(operation, "what", "") == "saved"]
    number = len([mark for mark in crash.reported if mark.what == "saved"])
    return reports[number] if number < len(reports) else None


# --- A sharded save, by two ranks one after the other


def save_by_two_ranks(run: Path, recorder: Recorder) -> None:
    folder = RunFolder(run)
    folder.create()
    ranks = [make_world(1, 2), make_world(0, 2)]  # the primary commits, so it comes last
    with (
        mock.patch.object(manager_module, "wait_for_all"),
        mock.patch.object(manager_module, "decided_by_primary", lambda world, decide: decide()),
    ):
        managers = [
            manager_module.CheckpointManager(
                folder.checkpoints, world, is_sharded=True, retention=Retention(), is_async=False
            )
            for world in ranks
        ]
        for manager in managers:
            state = {"step": 5, "keep": False, "validation": None}
            manager.save({"model": {"w": torch.ones(2)}}, state, {"step": 5}, is_best=False)
            manager.wait()
    assert (folder.checkpoints / "step-00000005" / "model-00001-of-00002.safetensors").exists()
    recorder.mark("saved", {"step": 5})


def check_sharded(run: Path, crash: Crash, coming: Any, *, goes_on: bool) -> None:
    found, rejected = store.find_newest(run / "checkpoints")
    assert rejected == []
    assert (found is not None) >= bool(crash.last("saved"))
    if found is not None:
        verify(found.path)
        assert len(found.files_of("model")) == 2


def test_no_crash_point_of_a_sharded_save_with_stand_in_collectives_leaves_a_partial_checkpoint(disk: Path) -> None:
    """A checkpoint has the slices of all ranks, or it has no name."""
    record = record_life(disk, save_by_two_ranks)
    for crashes in (kills, power_losses):
        try_all(disk, crashes(record), record, check_sharded).require_none(at_least=20)


# --- Set aside


def three_steps_one_damaged(run: Path) -> None:
    life = RunLife(run, retention=ALL_THREE)
    for _ in range(3):
        life.train(1)
        saved(life)
    life.close()
    payload = life.folder.checkpoints / "step-00000003" / "model.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1] + b"\xff")


def restart_with_damage(run: Path, recorder: Recorder) -> None:
    life = RunLife(run, retention=ALL_THREE)
    recorder.mark("resumed", life.step)
    life.close()


def check_after_damage(run: Path, crash: Crash, coming: Any, *, goes_on: bool) -> None:
    life = RunLife(run, retention=ALL_THREE)
    assert life.step == 2
    aside = life.folder.checkpoints / "damaged-step-00000003"
    assert aside.is_dir()
    assert len(list(aside.iterdir())) == 4  # damaged checkpoints are kept for inspection
    assert check_whole(life.folder) == {1, 2}
    life.close()


def test_no_crash_point_of_setting_a_damaged_checkpoint_aside_loses_a_complete_one(disk: Path) -> None:
    """The newest complete checkpoint is used, and the damaged one is kept for inspection."""
    record = record_life(disk, restart_with_damage, three_steps_one_damaged)
    for crashes in (kills, power_losses):
        try_all(disk, crashes(record), record, check_after_damage).require_none(at_least=10)


# --- Rewind


def three_steps(run: Path) -> None:
    life = RunLife(run, retention=ALL_THREE)
    for _ in range(3):
        life.train(1)
        saved(life)
    life.close()


def go_back(run: Path, recorder: Recorder) -> None:
    """Rewind from step 3 to step 1, then save one more step."""
    recorder.mark("saved", {"step": 3, "kept": [1, 2, 3], "best": 0, "line": 0})
    life = RunLife(run, retention=ALL_THREE, goes_back_to=1, line=1)
    recorder.mark("went back")
    life.train(1)
    saved(life, recorder)
    life.close()


def check_line(run: Path, crash: Crash, coming: Any, *, goes_on: bool) -> None:
    """A restart continues one branch, with the rows of that branch. After the report, it is the new branch."""
    check_whole(RunFolder(run))
    life = RunLife(run, retention=ALL_THREE)
    rows = [row["step"] for row in life.session.recorder._rows]  # type: ignore[union-attr]
    assert rows == list(range(1, life.step + 1))
    is_decided = any(mark.what == "went back" for mark in crash.reported)
    is_saved = crash.last("saved")["step"] == 2
    possible = {(2, 1)} if is_saved else {(1, 0), (2, 1)} if is_decided else {(3, 0), (2, 0), (1, 0)}
    assert (life.step, life.line) in possible
    life.close()


def test_no_crash_point_of_a_rewind_mixes_two_branches_of_a_run(disk: Path) -> None:
    """Before the rewind is on the disk, the run continues as before. Afterwards it continues from the rewound step."""
    record = record_life(disk, go_back, three_steps)
    for crashes in (kills, power_losses):
        try_all(disk, crashes(record), record, check_line).require_none(at_least=20)


# --- Takeover


def take_over(run: Path, recorder: Recorder) -> None:
    with lock.owned(run / "run.lock"):
        recorder.mark("owned")


def owned_by_a_dead_process(run: Path) -> None:
    run.mkdir()
    for name in (LOCK, OWNER_FILE):
        (run / name).write_text(new_owner().to_json())


def owned_by_no_process(run: Path) -> None:
    run.mkdir()


def check_lock(run: Path, crash: Crash, coming: Any, *, goes_on: bool) -> None:
    with lock.owned(run / "run.lock"):
        pass


@pytest.mark.parametrize("before", [owned_by_no_process, owned_by_a_dead_process])
@pytest.mark.parametrize("has_flock", [True, False], ids=["flock", "fake-no-flock"])
def test_no_crash_point_of_a_takeover_locks_the_folder_for_ever(
    disk: Path, before: Any, has_flock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start owns the folder, without help from a user."""
    if not has_flock:
        monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    record = record_life(disk, take_over, before)
    for crashes in (kills, power_losses):
        try_all(disk, crashes(record), record, check_lock).require_none(at_least=3)
