"""The listening addresses of an exercise's ranks."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from harness.sockets import beyond_loopback, listening_addresses
from paceline.tools.course.ranks import on_ranks

pytestmark = [pytest.mark.course, pytest.mark.usefixtures("rank_server")]
JOIN = """
import torch.distributed as dist
def join():
    dist.init_process_group("gloo")
"""


def _listeners(person: ModuleType, rank: int, world_size: int, has_group: bool) -> list[tuple[str, int]]:
    if not has_group:
        person.join()
    dist.barrier()
    found = listening_addresses([os.getpid()])
    dist.barrier()
    return found


@pytest.mark.parametrize("has_group", [True, False])
def test_the_ranks_of_an_exercise_listen_on_loopback_only(has_group: bool, tmp_path: Path) -> None:
    """SECURITY.md: also if the user's own code creates the group. torch's store would listen on all addresses."""
    path = tmp_path / "exercise.py"
    path.write_text(JOIN)
    found = [address for part in on_ranks(path, 2, _listeners, has_group, has_group=has_group) for address in part]
    assert len(found) >= (1 if has_group else 2)
    assert beyond_loopback(found) == []
