"""Our shell scripts stop at the first failure, without false failures. All pass shellcheck."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.shellcheck import REQUIRE, check_file, check_script, find_shellcheck

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "examples", "docs", "course", ".ci")
# grep -q and head end before they have read everything. With pipefail, a process that still writes fails the pipe.
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
def test_no_pipe_ends_in_a_command_that_exits_early(script: Path) -> None:
    lines = script.read_text().splitlines()
    found = [f"{script.name}:{n}: {line.strip()}" for n, line in enumerate(lines, start=1) if _HASTY.search(line)]
    assert not found, 'use a here-string: grep -q WORD <<<"$(command)"'


# --- shellcheck -------------------------------------------------------------------------------------------------------

GUIDES = (ROOT / "docs" / "guides" / "slurm-cluster.md", ROOT / "docs" / "guides" / "slurm.md")
_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def find_shell_files() -> list[Path]:
    """Every shell file. Of the course only answers: exercises have gaps, wrong answers are wrong on purpose."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    shells = (b"#!/bin/bash", b"#!/bin/sh", b"#!/usr/bin/env bash")
    found = [path for path in files if path.suffix == ".sh" or path.read_bytes()[:40].startswith(shells)]
    return sorted(path for path in found if path.parts[len(ROOT.parts)] != "course" or path.stem == "solution")


def test_shellcheck_includes_job_scripts() -> None:
    """Job scripts have no file extension."""
    names = {path.name for path in find_shell_files()}
    assert {"first-job.sbatch", "multi-node.sh", "setup-controller", "healthcheck", "run", "solution.sbatch"} <= names


@pytest.mark.parametrize("script", find_shell_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_passes_shellcheck(script: Path) -> None:
    """No finding of any level."""
    # The lesson exports in one line and uses single quotes, as its text explains.
    check_file(script, *(["--exclude=SC2016,SC2155"] if script.name == "solution.sbatch" else []))


def find_blocks() -> list[tuple[str, str]]:
    return [
        (f"{page.name}:{page.read_text()[: block.start()].count(chr(10)) + 1}", block[1])
        for page in GUIDES
        for block in _BLOCK.finditer(page.read_text())
    ]


def test_the_guides_have_commands() -> None:
    """Blocks of commands are marked as bash."""
    assert len([name for name, _ in find_blocks() if name.startswith("slurm-cluster.md")]) >= 15


@pytest.mark.parametrize("block", find_blocks(), ids=lambda block: str(block[0]))
def test_the_commands_of_a_guide_pass_shellcheck(block: tuple[str, str]) -> None:
    """As if a user put them into a script."""
    text = block[1] if block[1].startswith("#!") else f"#!/bin/bash\n{block[1]}"
    check_script(text)


def test_a_finding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail, and does not skip if it is required."""
    find_shellcheck()
    with pytest.raises(AssertionError, match="SC2086"):
        check_script("#!/bin/bash\necho $1\n")
    monkeypatch.setattr("harness.shellcheck.shutil.which", lambda *_, **__: None)
    monkeypatch.setenv(REQUIRE, "1")
    with pytest.raises(pytest.fail.Exception, match="shellcheck"):
        find_shellcheck()
