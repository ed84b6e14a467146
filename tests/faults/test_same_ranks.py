"""Ranks with another config, another version of the code or other data are refused and named."""

from __future__ import annotations

import pytest

from harness.ranks import run_ranks
from harness.runs import quick_config
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


@pytest.mark.parametrize("kind", ["code", "torch", "paceline"])
def test_other_versions_are_named(kind: str) -> None:
    everyone: list[dict[str, object]] = [{kind: "1", "host": "a"}, {kind: "1", "host": "b"}, {kind: "2", "host": "c"}]
    with pytest.raises(UserError, match=f"same {kind}") as caught:
        require_equal(everyone)
    assert caught.value.where == "rank 2 on c"
