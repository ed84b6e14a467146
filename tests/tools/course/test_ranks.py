"""How the ranks of an exercise can end, and the report of it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from harness.cli import command
from paceline.tools.course.ranks import on_ranks
from paceline.tools.course.verdict import Failed

pytestmark = [pytest.mark.course, pytest.mark.usefixtures("rank_server")]
PERSON = """\
import os

import torch
import torch.distributed as dist


def add(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()


def only_rank_1_adds():
    if dist.get_rank() == 1:
        add(1.0)


def fails_on_rank_1():
    if dist.get_rank() == 1:
        return {}["nothing"]
    return add(1.0)


def loops():
    while True: value = 0


def visible_gpus():
    return os.environ["CUDA_VISIBLE_DEVICES"]


def dies():
    if dist.get_rank() == 1:
        os._exit(7)
    return add(1.0)
"""


@pytest.fixture
def person(tmp_path: Path) -> Path:
    path = tmp_path / "a name with-dashes.py"
    path.write_text(PERSON)
    return path


def call(person: ModuleType, rank: int, world_size: int, name: str, *arguments: Any) -> Any:
    return getattr(person, name)(*arguments)


def test_values_come_back_by_rank(person: Path) -> None:
    assert on_ranks(person, 2, call, "add", 1.5) == [3.0, 3.0]


def test_ranks_see_no_gpu(person: Path) -> None:
    """fully_shard would use a GPU of the machine, on which gloo cannot gather. A fresh server forks these ranks."""
    here = Path(__file__).parent
    code = (
        "import os, test_ranks; from pathlib import Path; from paceline.tools.course.ranks import on_ranks, warm_up\n"
        f"warm_up(()); print(on_ranks(Path({str(person)!r}), 1, test_ranks.call, 'visible_gpus'))\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    paths = {"PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}", "CUDA_VISIBLE_DEVICES": "3"}
    answer = command(sys.executable, "-c", code, cwd=here, env=paths)
    assert answer.out.splitlines() == ["['']", "3"], answer.err


def test_a_hang_is_reported_within_seconds_with_the_lines(person: Path) -> None:
    began = time.monotonic()
    with pytest.raises(Failed) as caught:
        on_ranks(person, 2, call, "only_rank_1_adds")
    assert time.monotonic() - began < 30  # torch would wait ten minutes
    assert caught.value.hint == "hang"
    lines = caught.value.what.splitlines()
    assert lines[0] == "rank 0 has returned from the function"
    assert lines[1] == "rank 1 waits in line 9 of your file: dist.all_reduce(total)"


def test_an_error_is_reported_with_its_line_although_the_other_rank_hangs(person: Path) -> None:
    with pytest.raises(Failed) as caught:
        on_ranks(person, 2, call, "fails_on_rank_1")
    assert caught.value.hint == "exception"
    assert caught.value.what == "rank 1: line 20: return {}[\"nothing\"]\nKeyError: 'nothing'"


def test_a_rank_that_ends_its_process_is_named(person: Path) -> None:
    with pytest.raises(Failed) as caught:
        on_ranks(person, 2, call, "dies")
    assert (caught.value.hint, caught.value.what) == ("died", "the process of rank 1 ended")


def test_a_missing_function_is_reported(person: Path) -> None:
    with pytest.raises(Failed) as caught:
        on_ranks(person, 2, call, "subtract")
    assert (caught.value.hint, caught.value.what) == ("missing-name", "your file has no `subtract`")


def test_an_endless_loop_is_reported_with_its_line(person: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_ranks(person, 1, call, "add", 1.0)  # the fork server has imported torch by now
    monkeypatch.setattr("paceline.tools.course.ranks._DEADLINE_S", 6.0)
    with pytest.raises(Failed) as caught:
        on_ranks(person, 1, call, "loops")
    assert caught.value.hint == "endless"
    assert caught.value.what == "rank 0 is still busy in line 25 of your file: while True: value = 0"
