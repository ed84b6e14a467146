"""Python's garbage collection is paused during the setup of a run, and ignores the objects of the setup afterwards."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cli import command
from harness.ranks import make_world
from harness.runs import train_in
from paceline.runtime import memory
from paceline.runtime.memory import no_search_for_garbage
from paceline.training import session
from paceline.training.components import build_components

# In a separate process: ranks are forked from the server of the first caller.
A_RANK = """
import gc, multiprocessing
from paceline.launch.rank_processes import start_fork_server

def look(answers):
    answers.send((gc.isenabled(), gc.get_freeze_count()))

if __name__ == "__main__":
    start_fork_server(["paceline.training.worker"])
    answers, theirs = multiprocessing.Pipe()
    rank = multiprocessing.get_context("forkserver").Process(target=look, args=(theirs,))
    rank.start()
    is_enabled, left_alone = answers.recv()
    rank.join()
    assert is_enabled
    assert left_alone > 100_000, left_alone  # torch is among them
"""


class Ring:
    """Refers to itself: only a collection finds that nothing else refers to it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(params=[True, False], ids=["was on", "was off"])
def is_enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    gc.collect()  # otherwise the garbage of other tests would count
    yield request.param
    (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("many", [0, 10**9])
def test_collection_is_paused_and_runs_once_after_a_large_setup(
    is_enabled: bool, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_MANY", many)
    searches: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            searches.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with no_search_for_garbage():
            ring = weakref.ref(Ring())
            built: list[list[Any]] = [[] for _ in range(5000)]  # more than a collection needs to start
            assert searches == []
        is_found = ring() is None
    finally:
        gc.callbacks.remove(note)
    assert (2 in searches) == (many == 0)
    if many == 0:
        assert is_found
    assert gc.isenabled() == is_enabled
    assert len(built) == 5000


def test_collection_is_restored_after_a_failure(is_enabled: bool) -> None:
    with pytest.raises(ZeroDivisionError), no_search_for_garbage():
        _ = 1 / 0
    assert gc.isenabled() == is_enabled


def test_two_sessions_in_one_process_leave_no_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def open_and_note(*given: Any, **more: Any) -> Any:
        components = build_components(*given, **more)
        opened.append(
            [
                weakref.ref(part)
                for part in (components.model.module, components.optimizer, components.train_data, components.step)
            ]
        )
        return components

    monkeypatch.setattr(session, "build_components", open_and_note)
    for name in ("first", "second"):
        train_in(make_world(0, 1), str(tmp_path / name), ("--epochs=1",))
    gc.collect()
    assert [part() for parts in opened for part in parts] == [None] * 8


def test_a_rank_collects_its_own_garbage_and_ignores_torch(tmp_path: Path) -> None:
    program = tmp_path / "a_rank.py"  # a file: the rank imports its function from it
    program.write_text(A_RANK)
    answer = command(sys.executable, str(program), cwd=tmp_path, timeout_s=60)
    assert (answer.code, answer.err) == (0, "")
