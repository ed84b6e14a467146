"""A Slurm script uses this exit code instead of srun's. It is from a process that is not restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import EXIT_INTERNAL, EXIT_USER
from paceline.launch.policy import FINAL_CODE_FILE, note_final_code
from paceline.runtime.this_rank import OWN_LAUNCHER


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FINAL_CODE_FILE, str(tmp_path / "code"))
    monkeypatch.delenv(OWN_LAUNCHER, raising=False)
    return tmp_path / "code"


def test_the_first_final_code_counts(file: Path) -> None:
    note_final_code(EXIT_INTERNAL)  # a retry may help
    assert not file.exists()
    note_final_code(EXIT_USER)
    note_final_code(3)
    assert file.read_text() == f"{EXIT_USER}\n"


def test_a_rank_under_our_supervisor_writes_no_final_code(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor may restart the ranks, and the run may finish."""
    monkeypatch.setenv(OWN_LAUNCHER, "paceline")
    note_final_code(EXIT_USER)
    assert not file.exists()
