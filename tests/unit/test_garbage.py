"""Python's search for garbage rests while what stays is built, and leaves that alone afterwards."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest

from harness.cli import command
from paceline.world import garbage
from paceline.world.garbage import no_search_for_garbage

# In a process of its own: ranks come from the server of whoever asks first.
A_RANK = """
import gc, multiprocessing
from paceline.launch.attempt import _start_fork_server

def look(answers):
    answers.send((gc.isenabled(), gc.get_freeze_count()))

if __name__ == "__main__":
    _start_fork_server()
    answers, theirs = multiprocessing.Pipe()
    rank = multiprocessing.get_context("forkserver").Process(target=look, args=(theirs,))
    rank.start()
    is_enabled, left_alone = answers.recv()
    rank.join()
    assert is_enabled
    assert left_alone > 100_000, left_alone  # torch is among them
"""


class Collector:
    """Stands in for Python's own, whose frozen objects could not be told from those of other tests."""

    def __init__(self, *, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.events: list[str] = []

    def isenabled(self) -> bool:
        return self.is_enabled

    def disable(self) -> None:
        self.is_enabled = False
        self.events.append("disable")

    def enable(self) -> None:
        self.is_enabled = True
        self.events.append("enable")

    def collect(self, generation: int) -> None:
        self.events.append(f"collect {generation}")

    def freeze(self) -> None:
        self.events.append("freeze")


@pytest.fixture(params=[True, False], ids=["was on", "was off"])
def collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Collector:
    stand_in = Collector(is_enabled=request.param)
    monkeypatch.setattr(garbage, "gc", stand_in)
    return stand_in


def test_it_rests_while_something_is_built_and_is_as_before_afterwards(collector: Collector) -> None:
    before = collector.is_enabled
    with no_search_for_garbage():
        assert not collector.is_enabled
        collector.events.append("built")
    assert collector.is_enabled == before
    assert collector.events == ["disable", "built", "collect 1", "freeze", *(["enable"] if before else [])]


def test_it_is_as_before_after_a_failure(collector: Collector) -> None:
    before = collector.is_enabled
    with pytest.raises(ZeroDivisionError), no_search_for_garbage():
        _ = 1 / 0
    assert collector.is_enabled == before


def test_what_nobody_holds_is_gone_before_the_rest_is_left_alone() -> None:
    class Ring:
        pass

    with no_search_for_garbage():
        ring = Ring()
        ring.itself = ring
        is_gone = weakref.ref(ring)
        del ring
        assert is_gone() is not None  # only a search finds it
    assert is_gone() is None
    gc.unfreeze()


def test_a_rank_looks_for_its_own_garbage_and_leaves_torch_alone(tmp_path: Path) -> None:
    program = tmp_path / "a_rank.py"  # a file: the rank looks its function up in it
    program.write_text(A_RANK)
    answer = command(sys.executable, str(program), cwd=tmp_path, timeout_s=60)
    assert (answer.code, answer.err) == (0, "")
