from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoints import store
from paceline.runs.machine import Machine


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where code waits, the clock moves on and no time passes. Nothing else could happen meanwhile."""
    passed_s = [0.0]
    monkeypatch.setattr(store, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(Machine, "now_s", lambda self: passed_s[0])
    monkeypatch.setattr(Machine, "sleep", lambda self, seconds: passed_s.__setitem__(0, passed_s[0] + seconds + 0.5))


@pytest.fixture
def disk() -> Iterator[Path]:
    """In memory where possible: thousands of small folders are written and read."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="paceline-", dir=shared if shared.is_dir() else None))
    yield folder
    shutil.rmtree(folder)
