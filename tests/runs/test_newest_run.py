"""The run that `--resume auto` selects: the newest run of the same recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.made_runs import add_checkpoints, make_run
from paceline.runs.place import decide_place, newest_run_folder
from paceline.settings.load import load_config


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def saved_run(name: str, recipe: str | None) -> Path:
    folder = make_run(Path("runs") / name, recipe=recipe or "")
    if recipe is None:
        folder.environment.write_text(json.dumps({"paceline": "0.0.1"}))
    add_checkpoints(folder, 3)
    return folder.path


@pytest.mark.parametrize("recipe", ["sweep", "my[1]", "a*", "a?b", "a.b", "x-20260101-000000", "(a|b)", "{n}", "日本"])
def test_a_recipe_finds_its_own_runs(recipe: str) -> None:
    """No character of a name has a special meaning."""
    own = saved_run(f"{recipe}-20261116-101010", recipe)
    assert newest_run_folder(recipe) == own


@pytest.mark.parametrize(
    ("recipe", "other"),
    [
        ("sweep", "sweep-3"),
        ("sweep", "sweep-20261116"),
        ("sweep", "sweep-20261116-101010"),
        ("sweep", "sweep-rehearsal"),
        ("my[1]", "my1"),
        ("a*", "ab"),
        ("a?c", "abc"),
        ("a.c", "abc"),
    ],
)
def test_a_recipe_does_not_find_runs_of_another(recipe: str, other: str) -> None:
    """`sweep` ignores the runs of `sweep-3`, even if they are newer."""
    saved_run(f"{other}-20261116-111111", other)
    assert newest_run_folder(recipe) is None
    own = saved_run(f"{recipe}-20250101-000000", recipe)
    assert newest_run_folder(recipe) == own


def test_the_recorded_recipe_has_priority_over_the_folder_name() -> None:
    """A folder with a name of this recipe, written by another recipe, is ignored."""
    saved_run("sweep-20261116-101010", "another")
    assert newest_run_folder("sweep") is None
    unrecorded = saved_run("sweep-20250101-000000", None)
    assert newest_run_folder("sweep") == unrecorded


def test_the_newest_of_one_second_has_the_highest_number() -> None:
    """The tenth run of a second is newer than the second one."""
    for number in ("", "-2", "-10", "-9"):
        saved_run(f"sweep-20261116-101010{number}", "sweep")
    assert newest_run_folder("sweep") == Path("runs/sweep-20261116-101010-10")
    saved_run("sweep-20261116-101011", "sweep")
    assert newest_run_folder("sweep") == Path("runs/sweep-20261116-101011")


def test_a_copied_config_finds_its_own_runs() -> None:
    """A run's config.yaml as a recipe is named after its run. Its runs record the original recipe."""
    made = saved_run("sweep-20261116-101010-20261117-101010", "sweep")
    assert newest_run_folder("sweep-20261116-101010") == made


def test_resume_auto_selects_the_run_of_its_recipe(here: Path) -> None:
    """The decision that `paceline train --resume auto` makes."""
    for name in ("sweep", "sweep-3", "my[1]"):
        (here / f"{name}.yaml").write_text("epochs: 3\n")
        saved_run(f"{name}-20261116-101010", name)
    for name in ("sweep", "sweep-3", "my[1]"):
        place = decide_place(load_config(f"{name}.yaml", ["--resume", "auto"]))
        assert place.folder == place.resume_from == Path("runs") / f"{name}-20261116-101010"
