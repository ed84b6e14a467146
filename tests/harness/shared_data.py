"""Real CIFAR-10 for tests: unpacked once per machine from the shared reference data, or a skip."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paceline.data.fetch import locked

SHARED_DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def real_cifar10() -> Path:
    """A data folder with cifar-10-batches-bin. Skips the test if the data is not available."""
    unpack = SHARED_DATA / "unpack-cifar10"
    if not unpack.exists():
        reason = f"no shared reference data at {SHARED_DATA}"
        if os.environ.get("PACELINE_REQUIRE_SHARED"):
            pytest.fail(f"{reason}, and PACELINE_REQUIRE_SHARED is set")
        pytest.skip(reason)
    data_dir = Path(tempfile.gettempdir()) / "paceline-test-cifar10"
    done = data_dir / "complete"
    with locked(data_dir):
        if not done.exists():
            subprocess.run([sys.executable, str(unpack), str(data_dir)], check=True)
            done.touch()
    return data_dir
