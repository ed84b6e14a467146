"""A short soak: every kind of fault once in one run. Its weights are bit-equal to those of an undisturbed run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.faults
def test_one_fault_of_every_kind_does_not_change_the_weights(tmp_path: Path) -> None:
    """Kills, stops, suspensions, outages, a full disk, a lost store and a lost terminal change no bit."""
    report = tmp_path / "report.md"
    done = subprocess.run(
        [sys.executable, str(SOAK), "--faults", "10", "--output", str(report)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    rows = [line.split("|")[2].strip() for line in report.read_text().splitlines() if line.startswith("| ")]
    assert rows[1:] == ["1"] * 10 + ["10"]  # after the heading: one row for each kind, and the sum
