"""One server that forks all ranks of the course's tests."""

from __future__ import annotations

import pytest

from paceline.tools.course.lessons import LESSONS
from paceline.tools.course.ranks import warm_up


@pytest.fixture(scope="session")
def rank_server() -> None:
    """With all imports of any lesson's ranks: a running server cannot import more."""
    warm_up(tuple(name for lesson in LESSONS for name in lesson.modules))
