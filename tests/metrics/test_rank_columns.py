"""The results of each rank's samples in an epoch, also if a resumed run does not know them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.training.epoch import rank_columns
from paceline.training.state import EpochSums
from paceline.training.validate import _log_own_samples


def session_on(world_size: int, ranks: list[list[float]]) -> Any:
    state = SimpleNamespace(epoch_sums=EpochSums(ranks=ranks))
    components = SimpleNamespace(plan=SimpleNamespace(info=SimpleNamespace(task="single-label")))
    world = SimpleNamespace(world_size=world_size, rank=world_size - 1)
    return SimpleNamespace(state=state, world=world, components=components)


def test_one_column_for_each_rank() -> None:
    session = session_on(2, [[4.0, 1.0, 2.0], [9.0, 3.0, 3.0]])
    assert rank_columns(session) == {"loss": [2.0, 3.0], "accuracy": [0.5, 1.0], "samples": [2.0, 3.0]}


@pytest.mark.parametrize("ranks", [[], [[4.0, 1.0, 2.0]], [[4.0, 1.0, 2.0]] * 8], ids=["older", "fewer", "more"])
def test_a_run_that_resumes_before_its_validation_continues(ranks: list[list[float]]) -> None:
    """From an older checkpoint, or on another number of ranks: the sums of the ranks are unknown, and nothing fails."""
    session = session_on(4, ranks)
    assert rank_columns(session) == {}
    _log_own_samples(session, 1, 2.0)
