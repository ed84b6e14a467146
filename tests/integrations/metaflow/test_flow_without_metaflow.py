"""The example flows if Metaflow is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.cli import command
from harness.packages import hide_packages
from paceline.errors import EXIT_USER

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "metaflow"


@pytest.mark.parametrize("name", ["flow.py", "flow_torchrun.py", "test_flow.py"])
def test_a_flow_without_metaflow_gives_one_screen(name: str, tmp_path: Path) -> None:
    """Exit code 2 and the package to install. No traceback."""
    hidden = hide_packages(tmp_path / "without", "metaflow", "metaflow_extensions")
    answer = command(sys.executable, str(EXAMPLES / name), "run", cwd=tmp_path, env=hidden)
    assert answer.code == EXIT_USER
    assert "Traceback" not in answer.err
    assert "[metaflow]" in answer.err
    assert len(answer.err.splitlines()) < 10
