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
    """Advance the clock instead of waiting. Nothing else could happen in that time."""
    passed_s = [0.0]
    monkeypatch.setattr(store, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(Machine, "now_s", lambda self: passed_s[0])
    monkeypatch.setattr(Machine, "sleep", lambda self, seconds: passed_s.__setitem__(0, passed_s[0] + seconds + 0.5))


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder, in memory if possible: the tests write and read thousands of small folders."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="paceline-", dir=shared if shared.is_dir() else None))
    yield folder
    shutil.rmtree(folder)
