"""Links and FIFOs in a run folder: nothing outside of it changes, and nothing blocks."""

from __future__ import annotations

import os
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from harness.cli import paceline
from paceline.checkpoints.payload import Box, Piece, write_pieces
from paceline.errors import UserError
from paceline.launch.report import FailureReport
from paceline.metrics.recorder import Recorder
from paceline.metrics.safe_output import SafeStream
from paceline.runs import lock
from paceline.runs.drafts import draft_of, write_draft
from paceline.runs.folder import RankLog, RunFolder
from paceline.runtime.pulse import Pulse
from paceline.runtime.watchdog import Watchdog
from paceline.settings.small_files import make_plain_folder, open_plain, write_plain

FILES = ["run.lock", "run.owner", "metrics.jsonl", "failures.jsonl", "faults.jsonl", "requeues.jsonl"]
FILES += ["logs/rank-0.log", "stacks/attempt-1-rank-0.txt", "profile/rank-0.json.gz"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    made.stacks.mkdir()
    (made.path / "profile").mkdir()
    return made


@pytest.mark.parametrize("kind", ["link", "link to nothing", "fifo"])
@pytest.mark.parametrize("name", FILES)
def test_a_name_that_is_not_a_plain_file_is_refused(folder: RunFolder, tmp_path: Path, name: str, kind: str) -> None:
    """Before the first write: the file behind a link is unchanged, and none is created."""
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


@pytest.mark.parametrize("name", ["logs", "stacks", "bad-batches", "tensorboard", "profile", ".mirror"])
def test_a_folder_that_is_a_link_is_refused(folder: RunFolder, tmp_path: Path, name: str) -> None:
    """Logs and stacks are written, and empty stacks removed, only in the run folder."""
    (tmp_path / "other").mkdir()
    if (folder.path / name).exists():
        (folder.path / name).rmdir()
    (folder.path / name).symlink_to(tmp_path / "other")
    with pytest.raises(UserError) as refused, folder.owned():
        pytest.fail("owned")
    assert refused.value.where == str(folder.path / name)


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_link_that_appears_after_the_check_is_not_followed(tmp_path: Path, kind: str) -> None:
    """The lock, a log and stacks are opened without following a link or blocking on a FIFO."""
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


def test_no_writer_changes_a_file_behind_a_link(folder: RunFolder, tmp_path: Path) -> None:
    """Links that appear during a run: metrics, ledgers, failures, the supervisor's notes and checkpoint files."""
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    piece = {"a": Piece(torch.zeros(2), Box((0,), (2,)), (2,))}
    temporary = folder.checkpoints / ".tmp-step-00000001"
    temporary.mkdir()
    for path in (folder.metrics_jsonl, folder.faults, folder.failures, temporary / "model.safetensors"):
        path.symlink_to(mine)
    for write in (
        lambda: write_plain(folder.faults, b"text", appends=True),
        lambda: write_pieces(temporary / "model.safetensors", piece),
    ):
        with pytest.raises(UserError):
            write()
    FailureReport(**dict.fromkeys(field.name for field in fields(FailureReport))).write(folder)  # type: ignore[arg-type]
    Recorder(folder, resume_step=0).close()  # replaces the link
    assert not folder.metrics_jsonl.is_symlink()
    assert mine.read_text() == "mine"


def test_a_linked_folder_gets_no_checkpoint_file(folder: RunFolder, tmp_path: Path) -> None:
    """A link with the temporary name of a save, or with the name of a folder that is created later."""
    (tmp_path / "other").mkdir()
    (folder.checkpoints / ".tmp-step-00000001").symlink_to(tmp_path / "other")
    with pytest.raises(UserError):
        make_plain_folder(folder.checkpoints / ".tmp-step-00000001")


def test_the_name_of_a_draft_is_unpredictable(folder: RunFolder, tmp_path: Path) -> None:
    """Two drafts of one process have two names. A name that exists is not written."""
    first, second = draft_of(folder.status), draft_of(folder.status)
    assert first != second
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    first.symlink_to(mine)
    with pytest.raises(FileExistsError):
        write_draft(first, b"text")
    assert mine.read_text() == "mine"


def test_only_our_own_drafts_are_removed(folder: RunFolder) -> None:
    """A new owner removes the drafts of killed processes. Files with other names, folders and links stay."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    ours, living = draft_of(folder.status, ended.pid), draft_of(folder.status)
    others = [f".notes.{ended.pid}.tmp", f".{ended.pid}.tmp", f".status.json.{ended.pid}.tmp", ".x.1-0.paceline-draft"]
    for path in (ours, living, *(folder.path / name for name in others)):
        path.write_text("text")
    draft_of(folder.data, ended.pid).mkdir()
    draft_of(folder.data, ended.pid).symlink_to(folder.path)
    before = set(folder.path.iterdir()) - {ours}
    with folder.owned():
        pass
    assert set(folder.path.iterdir()) - {folder.lock} == before


def test_console_output_does_not_follow_a_link(tmp_path: Path) -> None:
    """Output that the console does not accept is dropped, not written outside of the run folder."""
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
