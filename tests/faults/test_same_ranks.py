"""Ranks with another config, another version of the code or other data are refused and named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.ranks import run_ranks
from harness.runs import quick_config, train_in
from paceline.errors import UserError
from paceline.runtime.detect import World
from paceline.training.same_ranks import require_equal, require_same_data, require_same_ranks


def join_with(world: World, flags: list[list[str]]) -> str:
    try:
        require_same_ranks(quick_config(*flags[world.rank]), world)
    except UserError as error:
        return error.screen()
    return "the same"


def join_with_data(world: World, prints: list[str]) -> str:
    try:
        require_same_data(prints[world.rank], world)
    except UserError as error:
        return error.screen()
    return "the same"


def train_with_own_file(world: World, home: str) -> str:
    os.chdir(Path(home) / str(world.rank))
    try:
        train_in(world, f"{home}/run", ("--metrics=own.py:hit", "--max-steps=1"))
    except UserError as error:
        return error.screen()
    return "the same"


def test_another_config_is_named_on_every_rank() -> None:
    flags = [[], [], ["--base-lr=0.7"]]
    screens = run_ranks(3, join_with, flags)
    assert len(set(screens)) == 1
    assert "the ranks do not have the same config" in screens[0]
    assert "rank 2 on testhost" in screens[0]
    assert "has base_lr 0.7, the others 0.1" in screens[0]
    assert run_ranks(2, join_with, [["--data-dir=a"], ["--data-dir=b"]]) == ["the same"] * 2


def test_other_data_is_named() -> None:
    screens = run_ranks(3, join_with_data, ["aa", "bb", "aa"])
    assert "the ranks do not have the same data" in screens[0]
    assert "rank 1 has bb, the others aa" in screens[0]


@pytest.mark.parametrize("is_same", [True, False])
def test_another_file_with_functions_is_named(is_same: bool, tmp_path: Path) -> None:
    """The run stores the source of the primary rank, so every rank must use the same source."""
    text = "def hit(logits, labels):\n    return (logits.argmax(1) == labels).float()\n"
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "own.py").write_text(text if is_same or rank == 0 else text + "# another\n")
    screens = run_ranks(2, train_with_own_file, str(tmp_path))
    if is_same:
        assert screens == ["the same"] * 2
    else:
        assert "the ranks do not have the same functions" in screens[0]
        assert "metrics:hit" in screens[1]


@pytest.mark.parametrize("kind", ["code", "torch", "paceline"])
def test_other_versions_are_named(kind: str) -> None:
    everyone: list[dict[str, object]] = [{kind: "1", "host": "a"}, {kind: "1", "host": "b"}, {kind: "2", "host": "c"}]
    with pytest.raises(UserError, match=f"same {kind}") as caught:
        require_equal(everyone)
    assert caught.value.where == "rank 2 on c"
