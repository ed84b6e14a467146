"""One server that forks all ranks of the course's tests."""

from __future__ import annotations

import pytest

from paceline.tools.course.lessons import LESSONS
from paceline.tools.course.ranks import warm_up


@pytest.fixture(scope="session")
def rank_server() -> None:
    """With everything that any lesson's ranks import: a server cannot load more once it runs."""
    warm_up(tuple(name for lesson in LESSONS for name in lesson.modules))
