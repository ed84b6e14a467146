"""A checkpoints folder on another disk, reached by a link. One run folder uses it, a copy of that folder does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.cli import paceline
from paceline.errors import UserError
from paceline.runs.folder import RunFolder
from paceline.runs.linked_checkpoints import MARK

QUICK = ("train", "synthetic-mlp", "--num-samples=2000", "--processes=1", "--quiet")


@pytest.fixture
def first(tmp_path: Path) -> RunFolder:
    (tmp_path / "scratch").mkdir()
    return linked(tmp_path / "first", tmp_path / "scratch")


def linked(path: Path, target: Path) -> RunFolder:
    path.mkdir()
    (path / "checkpoints").symlink_to(target)
    return RunFolder(path)


def require_refused(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="belong to another run") as refused, folder.owned():
        pytest.fail("owned")
    assert refused.value.exit_code == 2
    with pytest.raises(UserError, match="belong to another run"):
        folder.refuse_if_owned()


def test_a_linked_checkpoints_folder_is_used_by_every_start(first: RunFolder) -> None:
    """Its run folder stays its owner at every start."""
    for _ in range(2):
        with first.owned():
            assert json.loads((first.checkpoints / MARK).read_text())["folder"] == str(first.path)


def test_a_copy_of_a_run_folder_does_not_use_its_checkpoints(first: RunFolder, tmp_path: Path) -> None:
    """The link is copied, the checkpoints are not. The copy is refused, and the original continues."""
    with first.owned():
        pass
    shutil.copytree(first.path, tmp_path / "copy", symlinks=True)
    require_refused(RunFolder(tmp_path / "copy"))
    with first.owned():
        pass


def test_a_moved_run_folder_keeps_its_checkpoints(first: RunFolder, tmp_path: Path) -> None:
    """The mark follows the run folder."""
    with first.owned():
        pass
    moved = RunFolder(first.path.rename(tmp_path / "moved"))
    with moved.owned():
        assert json.loads((moved.checkpoints / MARK).read_text())["folder"] == str(moved.path)


def test_checkpoints_of_a_deleted_run_folder_can_be_used(first: RunFolder, tmp_path: Path) -> None:
    """The mark of a deleted run folder of this host does not refuse another one."""
    with first.owned():
        pass
    shutil.copytree(first.path, tmp_path / "copy", symlinks=True)
    shutil.rmtree(first.path)
    with RunFolder(tmp_path / "copy").owned():
        pass


def test_a_mark_of_another_host_is_refused(first: RunFolder, tmp_path: Path) -> None:
    """Its run folder is not visible here. The message has the command that removes the mark."""
    words = {"folder": str(tmp_path / "nowhere"), "inode": 1, "host": "elsewhere"}
    (tmp_path / "scratch" / MARK).write_text(json.dumps(words))
    require_refused(first)


def test_a_link_into_another_run_folder_is_refused(tmp_path: Path) -> None:
    """Checkpoints inside their own run folder need no mark."""
    other = RunFolder(tmp_path / "other")
    other.create()
    with other.owned():
        pass
    assert not (other.checkpoints / MARK).exists()
    require_refused(linked(tmp_path / "first", other.checkpoints))


@pytest.mark.long
def test_training_in_a_copy_does_not_change_the_linked_checkpoints(first: RunFolder, tmp_path: Path) -> None:
    """Two commands, like a user's. The second ends with exit code 2 and changes nothing."""
    answer = paceline(*QUICK, "--epochs=1", "--output-dir=first", cwd=tmp_path)
    assert answer.code == 0, answer
    shutil.copytree(first.path, tmp_path / "copy", symlinks=True)
    files = {path: path.read_bytes() for path in (tmp_path / "scratch").rglob("*") if path.is_file()}
    answer = paceline(*QUICK, "--epochs=2", "--output-dir=copy", "--resume=auto", cwd=tmp_path)
    assert answer.code == 2, answer
    assert {path: path.read_bytes() for path in (tmp_path / "scratch").rglob("*") if path.is_file()} == files
    answer = paceline(*QUICK, "--epochs=2", "--output-dir=first", "--resume=auto", cwd=tmp_path)
    assert answer.code == 0, answer
