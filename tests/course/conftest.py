"""The marker of the course's own, longer tests."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "course: grades every answer of the course; `make test-course` and .ci/run")
