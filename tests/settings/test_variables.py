"""Numbers from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import paceline
from harness.made_runs import make_run
from paceline.errors import UserError
from paceline.runs.catalog import list_runs
from paceline.runs.folder import RunFolder
from paceline.runs.place import decide_place
from paceline.settings.load import load_config
from paceline.settings.values import read_number, read_whole

NAMES = ["PACELINE_STORAGE_PATIENCE_S", "PACELINE_STORE_TIMEOUT_S", "PACELINE_START_TIMEOUT_S", "PACELINE_MAX_REQUEUES"]


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_number_in_the_environment_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    """Also a number that is read only at the end of a run."""
    answer = paceline("train", "synthetic-mlp", cwd=tmp_path, env={name: "abc"})
    assert (answer.code, list(tmp_path.iterdir())) == (2, []), answer
    assert name in answer.err


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e999", "abc", "0x10", " "])
def test_a_value_that_is_not_a_number_is_refused(text: str) -> None:
    """A limit of nan would never end."""
    with pytest.raises(UserError):
        read_number("A", 1.0, {"A": text})
    with pytest.raises(UserError):
        read_whole("A", 1, {"A": text})


def test_numbers_are_read() -> None:
    """An empty variable counts as not set."""
    assert [read_number("A", 1.5, there) for there in ({}, {"A": ""}, {"A": "0"}, {"A": "2.5"})] == [1.5, 1.5, 0.0, 2.5]
    assert [read_whole("A", 3, there) for there in ({}, {"A": ""}, {"A": "0"}, {"A": "25"})] == [3, 3, 0, 25]


@pytest.mark.parametrize("flag", ["--output-dir", "--resume", "--init-from"])
@pytest.mark.parametrize("value", ["", "x" * 300, "/".join(["y" * 200] * 30)], ids=["empty", "long-name", "long-path"])
def test_an_impossible_path_is_refused(tmp_path: Path, flag: str, value: str) -> None:
    """An unset shell variable, or a name that no file system allows: exit code 2, and nothing is started."""
    answer = paceline("train", "synthetic-mlp", flag, value, cwd=tmp_path)
    assert (answer.code, list(tmp_path.iterdir())) == (2, []), answer


def test_working_copies_of_stores_are_listed_at_any_depth(tmp_path: Path) -> None:
    """A working copy has the path of its store. Other folders are searched three levels deep."""
    names = {"file/a/b/.hidden/c/d/run", "s3/bucket/night/of/may/run", "project/sweep/run"}
    for name in (*names, "project/sweep/deep/er/run"):
        make_run(tmp_path / name)
    assert {entry.name for entry in list_runs(tmp_path)} == names


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    """A project with its own results.json is no run folder. Unknown file names are allowed."""
    (tmp_path / "train.py").touch()
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks/empty.txt").touch()
    request = load_config("synthetic-mlp", ["--output-dir", str(tmp_path)])
    assert decide_place(request).folder == tmp_path
    RunFolder(tmp_path).drop_empty_stacks()
    assert (tmp_path / "stacks/empty.txt").exists()
    (tmp_path / "results.json").write_text("my own")
    with pytest.raises(UserError, match="holds other files"):
        decide_place(request)


@pytest.mark.parametrize(
    "name",
    [
        *("tensorboard/events", ".mirror/pin", "profile/top.txt", "profile/rank-0.json.gz", "logs/rank-0.log"),
        *("stacks/attempt-1-rank-0.txt", "checkpoints/best", "checkpoints/latest"),
    ],
)
def test_folders_of_other_programs_are_not_emptied_or_filled(tmp_path: Path, name: str) -> None:
    """A user's folder whose files a run would remove or overwrite is refused. An empty folder is allowed."""
    (tmp_path / name).parent.mkdir()
    request = load_config("synthetic-mlp", ["--output-dir", str(tmp_path)])
    assert decide_place(request).folder == tmp_path
    (tmp_path / name).write_text("my own")
    with pytest.raises(UserError) as refused:
        decide_place(request)
    assert (refused.value.exit_code, refused.value.got) == (2, name)
    (tmp_path / "run.lock").touch()  # a run was started here: these are its files
    assert decide_place(request).folder == tmp_path
