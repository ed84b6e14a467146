"""A real terminal for tests: tmux. Without it they skip, or fail under PACELINE_REQUIRE_TERMINAL."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.tmux import TMUX, Terminal


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with `paceline` as a command in its bin/, like an installed one."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "paceline"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m paceline "$@"\n')
    script.chmod(0o755)
    return tmp_path


@pytest.fixture
def open_terminal(home: Path) -> Iterator[Callable[..., Terminal]]:
    """A shell in a window of this number of columns. The window is closed after the test."""
    if TMUX is None and not os.environ.get("PACELINE_REQUIRE_TERMINAL"):
        pytest.skip("no tmux here")
    opened: list[Terminal] = []

    def open_one(columns: int, rows: int = 45, **variables: str) -> Terminal:
        opened.append(Terminal(home, columns, rows, variables))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.close()
