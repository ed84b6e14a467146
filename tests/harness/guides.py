"""Follow a guide like a new user: a fresh clone in an empty folder, and the page's lines in one shell."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import documents
from harness.cli import LAUNCH_VARIABLES, Answer
from harness.documents import REPOSITORY, Block
from harness.processes import kill_all_in

INSTALLS = re.compile(r"^(?:\S*bin/)?pip install |^make (?:setup|train)\b", re.MULTILINE)
# Variables of the test run, which a new user's shell does not have.
_NOT_FOR_GUIDES = (*LAUNCH_VARIABLES, "VIRTUAL_ENV", "PYTHONPATH", "OMP_NUM_THREADS", "PIP_CONSTRAINT")
_NOT_FOR_GUIDES_EITHER = ("PACELINE_", "PYTEST_", "MAKE", "SLURM_", "SBATCH_", "METAFLOW_", "RUNNABLE_")
# Runs the lines one after the other in one shell, so that `cd`, `export` and an activated venv persist. Package indexes
# sometimes answer "too many requests", so a line that installs is tried four times.
_TYPE = """
for line in "$@"; do
  printf '$ %s\\n' "$line"
  for pause in 5 15 45 0; do
    eval "$line" && break
    code=$?
    case "$line" in *"pip install "*) ;; *) exit $code ;; esac
    [ $pause -gt 0 ] || exit $code
    sleep $pause
  done
done
"""


def pages_that_install() -> dict[str, list[Block]]:
    """Every page with an install line, and its blocks that contain one."""
    found: dict[str, list[Block]] = {}
    for page in documents.pages():
        for block in documents.blocks(page):
            if block.language in documents.SHELL and INSTALLS.search(block.text):
                found.setdefault(block.page, []).append(block)
    return found


def lines_of(page: str, *, with_text: str, last: str | None = None) -> list[str]:
    """The lines of the first shell block of a page with this text, up to the line that starts with `last`."""
    blocks = [block for block in documents.blocks(REPOSITORY / page) if block.language in documents.SHELL]
    block = next((block for block in blocks if with_text in block.text), None)
    assert block is not None, f"{page} has no block with {with_text!r}"
    lines = [line for line in block.text.replace("\\\n", " ").split("\n") if line.strip()]
    if last is None:
        return lines
    ends = [number for number, line in enumerate(lines) if line.startswith(last)]
    assert ends, f"{page}: no line of this block begins with {last!r}: {lines}"
    return lines[: ends[0] + 1]


@dataclass(frozen=True)
class Newcomer:
    """A user with a fresh clone."""

    clone: Path

    def types(
        self, lines: Iterable[str], timeout_s: float = 900, env: Mapping[str, str] | None = None, **more_env: str
    ) -> Answer:
        """Run these lines and return the output. Stops at the first error."""
        words = ["bash", "-c", _TYPE, "bash", *lines]
        with (
            (self.clone / ".out.txt").open("w+") as out,
            (self.clone / ".err.txt").open("w+") as err,
            subprocess.Popen(
                words,
                cwd=self.clone,
                env={**_plain_environment(), **(env or {}), **more_env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            ) as shell,
        ):
            try:
                code = shell.wait(timeout_s)
            finally:
                if shell.poll() is None:
                    os.killpg(shell.pid, signal.SIGKILL)
                    kill_all_in(self.clone)
            out.seek(0)
            err.seek(0)
            return Answer(code, out.read(), err.read())


def newcomer(folder: Path) -> Newcomer:
    """A clone of this checkout, including uncommitted changes."""
    clone = folder / "paceline"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    changed = _git("ls-files", "-z", "--modified", "--others", "--exclude-standard").split("\0")
    for name in filter(None, changed):
        source, target = REPOSITORY / name, clone / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        else:
            target.unlink(missing_ok=True)
    return Newcomer(clone)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout


def _plain_environment() -> dict[str, str]:
    """The machine's environment, without the venv of this checkout on the path."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _NOT_FOR_GUIDES and not name.startswith(_NOT_FOR_GUIDES_EITHER)
    }
    folders = [part for part in kept["PATH"].split(":") if not Path(part).resolve().is_relative_to(REPOSITORY)]
    return {**kept, "PATH": ":".join(folders)}
