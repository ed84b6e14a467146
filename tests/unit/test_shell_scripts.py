"""Our shell scripts stop at the first failure, and so must not hold a success for one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "examples", "docs", "course", ".ci")
# grep -q and head leave before they have read everything; under pipefail whoever still writes then fails the pipe.
_HASTY = re.compile(r"(?<!\|)\|\s*(grep\s+(-\S+\s+)*-[a-zA-Z]*q|head\b)")


def find_scripts() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(
        path for path in files if path.suffix == ".sh" or path.read_bytes()[:40].startswith(b"#!/usr/bin/env bash")
    )


def test_there_are_scripts() -> None:
    names = {path.name for path in find_scripts()}
    assert {"common.sh", "node", "setup-node", "run", "multi-node.sh"} <= names


@pytest.mark.parametrize("script", find_scripts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_pipe_ends_in_a_command_that_leaves_early(script: Path) -> None:
    lines = script.read_text().splitlines()
    found = [f"{script.name}:{n}: {line.strip()}" for n, line in enumerate(lines, start=1) if _HASTY.search(line)]
    assert not found, 'use a here-string: grep -q WORD <<<"$(command)"'
