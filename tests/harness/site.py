"""The documentation site, built as `make docs` builds it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.documents import REPOSITORY

ZENSICAL = REPOSITORY / ".venv-docs" / "bin" / "zensical"


def build_site(folder: Path) -> Path:
    """Build into an empty folder; returns the folder of the site. Any warning of the builder is an error."""
    if not ZENSICAL.exists() and not os.environ.get("PACELINE_REQUIRE_BROWSER"):
        pytest.skip("no .venv-docs here: make docs brings it")
    shutil.copy(REPOSITORY / "zensical.toml", folder)
    _run(folder, sys.executable, str(REPOSITORY / "docs" / "stage.py"), "build/pages")
    _run(folder, str(ZENSICAL), "build", "--clean", "--strict")
    return folder / "site"


def search_index(site: Path) -> list[dict[str, Any]]:
    """Every section that search knows: location, title, text."""
    items: list[dict[str, Any]] = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    return items


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
