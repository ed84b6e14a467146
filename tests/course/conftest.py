"""The marker of the course's own, longer tests, and one server that forks all their ranks."""

from __future__ import annotations

import pytest

from paceline.course.lessons import LESSONS
from paceline.course.ranks import warm_up


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "course: grades every answer of the course; `make test-course` and .ci/run")


@pytest.fixture(scope="session")
def rank_server() -> None:
    """With everything that any lesson's ranks import: a server cannot load more once it runs."""
    warm_up(tuple(name for lesson in LESSONS for name in lesson.modules))
