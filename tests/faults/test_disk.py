"""Faults 10 and 24: the disk is full, the run folder becomes read-only, the run folder is deleted."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from faults import disks, small_disk_child
from harness.cli import environment
from harness.ranks import make_world
from paceline.checkpoints import store
from paceline.checkpoints.format import step_folders, step_of, verify
from paceline.checkpoints.manager import CheckpointManager
from paceline.checkpoints.store import Retention
from paceline.errors import EXIT_CHECKPOINT, CheckpointError
from paceline.metrics.recorder import Recorder, read_rows
from paceline.runs import folder as folder_module
from paceline.runs.folder import RankLog, RunFolder

MOST_LINES = 12
ScenarioResult = dict[str, Any]


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ScenarioResult]:
    """The result of every scenario. One process runs all of them, because importing torch takes longest."""
    return in_own_namespace(small_disk_child.__file__, str(tmp_path_factory.mktemp("disks")))


def in_own_namespace(script: str, *arguments: str) -> ScenarioResult:
    """The output of a script that may mount disks, if the machine allows it."""
    if not can_mount():
        pytest.skip("this machine does not let us mount a tmpfs (unshare -rm)")
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, script, *arguments],
        env=environment(PYTHONPATH=os.pathsep.join(path for path in sys.path if path)),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found: ScenarioResult = json.loads(done.stdout)
    return found


def assert_stopped_in_one_screen(result: ScenarioResult, *parts: str) -> None:
    assert result["code"] == EXIT_CHECKPOINT, result
    screen = result["screen"]
    assert screen.startswith("error: ")
    assert "Traceback" not in screen + result["out"]
    assert len(screen.splitlines()) <= MOST_LINES
    for part in parts:
        assert part in screen


# --- Fault 10: full ---------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_disk_that_is_full_for_a_while_loses_only_checkpoints(scenarios: dict[str, ScenarioResult]) -> None:
    result, undisturbed = scenarios["full_for_a_while"], scenarios["enough_room"]
    assert result["was_full"]
    assert (result["code"], undisturbed["code"]) == (0, 0), result
    assert result["weights"] == undisturbed["weights"]  # steps lost: 0
    lines = [line for line in result["out"].splitlines() if line.startswith(("warning: ", "note: "))]
    failed = [line for line in lines if "a checkpoint could not be saved" in line]
    assert ["failure 1 in a row" in failed[0], "failure 2 in a row" in failed[1], len(failed)] == [True, True, 2]
    # One message at the start and one at the end. The status is written four times a second and may not notice it.
    for name, times in (("metrics.jsonl", {1}), ("status.json", {0, 1})):
        shown = sum(f"warning: {name} cannot be written: No space left on device" in line for line in lines)
        assert shown in times
        assert lines.count(f"note: {name} can be written again") == shown
    assert result["rows"] == list(range(1, 19))  # they were kept in memory
    assert (result["steps"], result["leftovers"]) == ([18], [])
    assert "warning" not in undisturbed["out"]


@pytest.mark.faults
def test_three_failed_saves_on_a_full_disk_end_the_run(scenarios: dict[str, ScenarioResult]) -> None:
    result = scenarios["full_for_good"]
    assert result["was_full"]
    assert_stopped_in_one_screen(result, "3 checkpoints in a row", "free disk space, then --resume auto")
    assert result["out"].count("could not be saved") == 3
    assert "step 12/18" in result["out"]  # training continued until then
    assert (result["steps"], result["leftovers"]) == ([3], [])


@pytest.mark.faults
def test_a_disk_that_is_too_small_is_reported_before_the_first_step(scenarios: dict[str, ScenarioResult]) -> None:
    result = scenarios["eight_megabytes"]
    warning = result["out"].index("warning: two checkpoints of 4 MB do not fit on the disk")
    assert warning < result["out"].index("step 1/18")
    assert_stopped_in_one_screen(result, "3 checkpoints in a row", "no room for")
    assert (result["steps"], result["leftovers"]) == ([3], [])


@pytest.mark.faults
def test_a_save_on_a_disk_that_becomes_full_leaves_no_files(scenarios: dict[str, ScenarioResult]) -> None:
    result = scenarios["full_while_writing"]
    assert result["failures"] == 1
    assert (result["steps"], result["leftovers"], result["bytes_left_behind"]) == ([1], [], 0)


def test_a_save_over_a_quota_by_rlimit_fsize_leaves_no_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager(tmp_path, make_world(0, 1), is_sharded=False, retention=Retention(), is_async=False)
    payload = {"model": {"w": torch.zeros(2**20)}}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (1, 2, 3):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 2**20 if step == 2 else soft, hard))
        try:
            manager.save(payload, {"step": step, "keep": False, "validation": None}, {"step": step}, is_best=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if step == 2:
            assert f"could not be saved: {os.strerror(errno.EFBIG)} (failure 1 in a row" in caplog.text
            assert [step_of(path) for path in step_folders(tmp_path)] == [1]
            assert not list(tmp_path.glob(".tmp-*"))
    assert [step_of(path) for path in step_folders(tmp_path)] == [3]
    verify(tmp_path / "step-00000003")


def test_metrics_over_a_quota_by_rlimit_fsize_are_kept_in_memory_without_partial_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="paceline")
    folder = RunFolder(tmp_path)
    recorder = Recorder(folder, resume_step=0)
    recorder.step(1, loss=0.5)
    size = folder.metrics_jsonl.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
    try:
        for step in (2, 3):
            recorder.step(step, loss=0.5)
        assert folder.metrics_jsonl.stat().st_size == size  # half of row 2 was written, and removed again
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    recorder.step(4, loss=0.5)
    recorder.close()
    assert [json.loads(line)["step"] for line in folder.metrics_jsonl.read_text().splitlines()] == [1, 2, 3, 4]
    assert len(read_rows(folder.metrics_jsonl)) == 4
    assert [message.split(":")[0] for message in caplog.messages] == ["warning", "note"]


def test_a_log_on_a_full_device_prints_one_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handler = RankLog(tmp_path / "full")
    handler._file.close()
    handler._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 - the handler closes it
    logger = logging.Logger("full")
    logger.addHandler(handler)
    for number in range(3):
        logger.info("line %d", number)
    handler.close()
    captured = capfd.readouterr()
    assert captured.err == ""
    assert captured.out == f"warning: full cannot be written: {os.strerror(errno.ENOSPC)}\n"


# --- Fault 24: read-only, or deleted ----------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_folder_that_becomes_read_only_ends_the_run_with_one_screen(scenarios: dict[str, ScenarioResult]) -> None:
    result = scenarios["read_only"]
    assert result["is_read_only"]
    assert_stopped_in_one_screen(result, "the run folder cannot be written any more", os.strerror(errno.EROFS))
    assert result["steps"] == [3]
    assert "step 6/18" not in result["out"]  # at once, not after three failed saves


@pytest.mark.faults
def test_checkpoints_that_become_read_only_end_the_run_at_the_next_save(scenarios: dict[str, ScenarioResult]) -> None:
    result = scenarios["read_only_when_saving"]
    assert_stopped_in_one_screen(result, "the run folder cannot be written any more", os.strerror(errno.EROFS))
    assert result["steps"] == [3]
    assert "step 6/18" in result["out"]
    assert "step 7/18" not in result["out"]


@pytest.mark.faults
def test_a_deleted_folder_ends_the_run_and_is_not_recreated(scenarios: dict[str, ScenarioResult]) -> None:
    result = scenarios["deleted"]
    assert_stopped_in_one_screen(result, "the run folder cannot be written any more", os.strerror(errno.ENOENT))
    assert not result["exists"]
    assert "step 6/18" not in result["out"]


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen at once", "fake: seen when it writes"])
def test_a_save_into_a_deleted_folder_does_not_recreate_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_seen: bool
) -> None:
    manager = CheckpointManager(
        tmp_path / "run", make_world(0, 1), is_sharded=False, retention=Retention(), is_async=True
    )
    shutil.rmtree(tmp_path / "run")
    if not is_seen:
        monkeypatch.setattr(store, "free_bytes", lambda _: 10**12)
    manager.save({"model": {"w": torch.zeros(3)}}, {"step": 1}, {"step": 1}, is_best=False)
    with pytest.raises(CheckpointError, match="cannot be written any more"):
        manager.wait()
    assert not (tmp_path / "run").exists()


def test_a_status_that_cannot_be_written_does_not_hide_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "gone")
    folder.write_status("failed", reason="something else")
    with pytest.raises(CheckpointError):
        folder.write_status("running", step=3)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder_module, "write_json", full)
    folder.write_status("running", step=3)  # a full disk does not end the run


# --- Both, with the command -------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize(
    ("scenario", "part"),
    [
        ("eight megabytes", "3 checkpoints in a row could not be saved"),
        ("full", "3 checkpoints in a row could not be saved"),
        ("read-only", "the run folder cannot be written any more"),
        ("deleted", "the run folder cannot be written any more"),
    ],
)
def test_a_lost_disk_ends_the_command_with_one_screen(scenario: str, part: str, tmp_path: Path) -> None:
    assert_stopped_in_one_screen(in_own_namespace(disks.__file__, str(tmp_path), scenario), part)
