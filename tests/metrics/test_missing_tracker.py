"""Trackers that are not installed: a default is skipped with a note, a chosen one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import Answer, paceline
from harness.packages import hide_packages

FLAGS = ["--num-samples=64", "--global-batch-size=32", "--epochs=1", "--hidden-size=8", "--processes=1"]


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    return hide_packages(tmp_path / "without", "tensorboard")


def train(*arguments: str, cwd: Path, hidden: dict[str, str]) -> Answer:
    return paceline("train", *arguments, cwd=cwd, env=hidden)


@pytest.mark.long
def test_the_config_of_a_run_is_trained_again_without_its_default_tracker(
    tmp_path: Path, hidden: dict[str, str]
) -> None:
    """config.yaml records which settings are defaults. A missing default tracker is one line, in both runs."""
    first = train("synthetic-mlp", *FLAGS, "--output-dir=first", cwd=tmp_path, hidden=hidden)
    assert first.code == 0, first
    again = train("first/config.yaml", "--output-dir=again", cwd=tmp_path, hidden=hidden)
    assert again.code == 0, again
    for answer in (first, again):
        assert (answer.out + answer.err).count("[tensorboard]'") == 1
    assert not (tmp_path / "again" / "tensorboard").exists()
    assert (tmp_path / "again" / "config.yaml").read_text() == (tmp_path / "first" / "config.yaml").read_text().replace(
        "'first'", "'again'"
    )


@pytest.mark.parametrize("place", ["flag", "file"])
def test_a_chosen_tracker_that_is_missing_is_refused_with_its_origin(
    place: str, tmp_path: Path, hidden: dict[str, str]
) -> None:
    """Exit code 2 before a run folder exists. The error names the flag or the line."""
    recipe = "synthetic-mlp"
    choice = ["--track", "tensorboard"]
    if place == "file":
        (tmp_path / "mine.yaml").write_text("dataset: synthetic\ntrack: [tensorboard]\n")
        recipe, choice = "mine.yaml", []
    answer = train(recipe, *FLAGS, *choice, "--output-dir=run", cwd=tmp_path, hidden=hidden)
    assert answer.code == 2
    assert ("flag --track" if place == "flag" else "mine.yaml, line 2") in answer.err
    assert not (tmp_path / "run").exists()
