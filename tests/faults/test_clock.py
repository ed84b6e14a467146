"""Fault 19: the wall clock jumps by an hour or differs between ranks. Fakes: `time.time`, and mtimes of files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.finished_run import FLAGS
from harness.ranks import make_world, run_ranks
from harness.runs import read_results, train_in
from paceline.checkpoints.format import step_folders, step_of
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention, find_newest, open_checkpoint
from paceline.metrics.recorder import read_rows
from paceline.runs.place import claim_run_folder
from paceline.runtime.detect import World

HOUR_S = 3600.0
SKEW_S = 300.0


def jump(shifts: Iterator[float]) -> list[float]:
    """Shift every later reading of the wall clock by the next of these. Returns the values that were read."""
    real, given = time.time, []

    def shifted() -> float:
        given.append(real() + next(shifts))
        return given[-1]

    time.time = shifted
    return given


def train_while_the_clock_jumps(world: World, folder: str) -> int:
    """Two attempts of one run while the clock jumps by an hour in both directions. Returns the number of readings."""
    given = jump(cycle([0.0, -HOUR_S, HOUR_S]))
    train_in(world, folder, (*FLAGS, "--max-steps=13"))
    train_in(world, folder, FLAGS, resume=True)
    assert any(later < earlier - 1000 for earlier, later in pairwise(given))
    return len(given)


def train_with_skew(world: World, folder: str) -> int:
    given = jump(cycle([SKEW_S * world.rank]))
    train_in(world, folder, FLAGS)
    return len(given)


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for part in value.values():
            yield from numbers_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers_in(part)
    elif isinstance(value, int | float):
        yield value


def check_no_negative_value(folder: Path) -> None:
    rows = read_rows(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, 19))
    found = [*numbers_in(rows), *numbers_in(read_results(folder))]
    assert len(found) > 200
    assert min(found) >= 0
    for row in rows:
        assert 0 < row["throughput"] < 10**7  # a jump of an hour would make it far too large
        assert row.get("seconds", 1.0) < 100
    assert read_results(folder)["training_seconds"] < 100
    assert read_results(folder)["samples_per_second"] > 0


def test_fake_jumps_of_an_hour_change_nothing(tmp_path: Path, finished_run: Path) -> None:
    (asked,) = run_ranks(1, train_while_the_clock_jumps, str(tmp_path))
    assert asked > 18  # the fault took effect: rows contain the time
    check_no_negative_value(tmp_path)
    assert read_results(tmp_path)["weights_sha256"] == read_results(finished_run)["weights_sha256"]
    assert step_of(step_folders(tmp_path / "checkpoints")[0]) == 18
    assert open_checkpoint(tmp_path / "checkpoints" / "latest").step == 18


@pytest.mark.faults
def test_fake_skew_of_five_minutes_between_two_ranks_changes_nothing(tmp_path: Path) -> None:
    asked = run_ranks(2, train_with_skew, str(tmp_path / "skewed"))
    assert asked[0] > 18
    check_no_negative_value(tmp_path / "skewed")
    run_ranks(2, train_in, str(tmp_path / "steady"), FLAGS)
    hashes = {read_results(tmp_path / name)["weights_sha256"] for name in ("skewed", "steady")}
    assert len(hashes) == 1


@pytest.mark.parametrize("shift_s", [-HOUR_S, HOUR_S])
def test_the_newest_checkpoint_is_found_by_its_step_not_by_its_time(tmp_path: Path, shift_s: float) -> None:
    manager = CheckpointManager(
        tmp_path, make_world(0, 1), is_sharded=False, retention=Retention(keep_last=3), is_async=False
    )
    for step in (1, 2, 3, 4):
        state = {"step": step, "keep": False, "validation": None}
        manager.save({"model": {"w": torch.zeros(2)}}, state, {"step": step}, is_best=False)
        # Each checkpoint and its files look an hour older (or younger) than the one before.
        for path in (tmp_path / f"step-{step:08}").rglob("*"):
            os.utime(path, (time.time() + step * shift_s,) * 2)
        os.utime(tmp_path / f"step-{step:08}", (time.time() + step * shift_s,) * 2)
    by_time = sorted(step_folders(tmp_path), key=lambda path: path.stat().st_mtime, reverse=True)
    by_step = [step_of(path) for path in step_folders(tmp_path)]
    assert [step_of(path) for path in by_time] == (by_step if shift_s > 0 else by_step[::-1])  # the fault took effect
    assert by_step == [4, 3, 2]  # the oldest by step was dropped
    newest, _ = find_newest(tmp_path)
    assert newest is not None
    assert newest.step == 4


def test_fake_clock_jump_back_between_runs_gives_separate_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20261115-031810")  # always the same second
    names = [claim_run_folder("shapes-cnn").name for _ in range(11)]
    assert len(set(names)) == 11
    assert names == sorted(names)


def test_the_duration_of_a_save_does_not_depend_on_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shifts = cycle([HOUR_S, -HOUR_S])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(shifts))
    manager = CheckpointManager(tmp_path, make_world(0, 1), is_sharded=False, retention=Retention(), is_async=True)
    for step in (1, 2, 3):
        state = {"step": step, "keep": False, "validation": None}
        manager.save({"model": {"w": torch.zeros(2)}}, state, {"step": step}, is_best=False)
        manager.wait()
        assert 0 < manager.last_save_s < 60
    assert 0 < manager.stall_s < 60
