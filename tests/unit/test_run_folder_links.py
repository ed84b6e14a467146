"""Links and FIFOs in a run folder: nothing outside of it is changed, and nothing waits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.cli import paceline
from paceline.config.small_files import open_plain
from paceline.errors import UserError
from paceline.metrics.safe_output import SafeStream
from paceline.runs import lock
from paceline.runs.folder import RankLog, RunFolder
from paceline.world.pulse import Pulse
from paceline.world.watchdog import Watchdog

FILES = ["run.lock", "run.owner", "metrics.jsonl", "failures.jsonl", "faults.jsonl", "requeues.jsonl"]
FILES += ["logs/rank-0.log", "stacks/attempt-1-rank-0.txt"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    made.stacks.mkdir()
    return made


@pytest.mark.parametrize("kind", ["link", "link to nothing", "fifo"])
@pytest.mark.parametrize("name", FILES)
def test_a_name_that_is_no_plain_file_is_refused(folder: RunFolder, tmp_path: Path, name: str, kind: str) -> None:
    """Before anything is written: the file behind a link keeps its text, and none is made."""
    mine = tmp_path / "mine.txt"
    if kind == "link":
        mine.write_text("mine")
    if kind == "fifo":
        os.mkfifo(folder.path / name)
    else:
        (folder.path / name).symlink_to(mine)
    for hold in (folder.owned, folder.refuse_if_owned):
        with pytest.raises(UserError) as refused:
            hold().__enter__()  # type: ignore[union-attr]
        assert (refused.value.exit_code, refused.value.where) == (2, str(folder.path / name))
    assert mine.exists() == (kind == "link")
    assert kind != "link" or mine.read_text() == "mine"


@pytest.mark.parametrize("name", ["results.json", "data.json", "report.html", "config.yaml", "status.json"])
def test_a_folder_in_place_of_a_file_is_refused_at_the_start(folder: RunFolder, name: str) -> None:
    """Not after hours of training, when the file is written."""
    (folder.path / name).mkdir()
    with pytest.raises(UserError) as caught, folder.owned():
        pass
    assert name in str(caught.value.where)


@pytest.mark.parametrize("name", ["logs", "stacks", "bad-batches"])
def test_a_folder_that_is_a_link_is_refused(folder: RunFolder, tmp_path: Path, name: str) -> None:
    """Logs and stacks are written, and empty stacks removed, in the run folder only."""
    (tmp_path / "other").mkdir()
    if (folder.path / name).exists():
        (folder.path / name).rmdir()
    (folder.path / name).symlink_to(tmp_path / "other")
    with pytest.raises(UserError) as refused, folder.owned():
        pytest.fail("owned")
    assert refused.value.where == str(folder.path / name)


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_link_that_comes_after_the_look_is_not_followed(tmp_path: Path, kind: str) -> None:
    """The lock, a log and stacks are opened without following a link or waiting for a reader."""
    mine, path = tmp_path / "mine.txt", tmp_path / "name"
    mine.write_text("mine")
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(mine)
    watchdog = Watchdog(Pulse(None), is_supervised=True)
    for write in (
        lambda: lock.owned(path).__enter__(),
        lambda: RankLog(path),
        lambda: watchdog.open_stacks(path),
        lambda: open_plain(path, os.O_WRONLY | os.O_TRUNC),
    ):
        with pytest.raises(UserError):
            write()
    assert mine.read_text() == "mine"


def test_console_output_does_not_follow_a_link(tmp_path: Path) -> None:
    """What the console does not take is dropped rather than written outside of the run folder."""
    mine, path = tmp_path / "mine.txt", tmp_path / "rank-0.log"
    mine.write_text("mine")
    path.symlink_to(mine)
    readable, writable = os.pipe()
    os.close(readable)
    stream = SafeStream(writable, "utf-8")
    stream.keep_in(path, "")
    stream.write("text\n")
    assert stream.loss is not None
    assert mine.read_text() == "mine"
    os.close(writable)


def test_a_forged_run_folder_is_one_screen_and_exit_code_2(tmp_path: Path) -> None:
    """The command names the link, and changes nothing."""
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "rank-0.log").symlink_to(tmp_path / "mine.txt")
    answer = paceline("train", "synthetic-mlp", "--processes=1", "--output-dir=run", cwd=tmp_path)
    assert answer.code == 2, answer
    assert "rank-0.log" in answer.err
    assert (tmp_path / "mine.txt").read_text() == "mine"
