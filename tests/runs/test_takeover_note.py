"""A start after a dead owner names that owner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.cli import paceline

DIES = """
import os, sys
from pathlib import Path
from paceline.runs.folder import RunFolder
with RunFolder(Path(sys.argv[1])).owned():
    os._exit(0)
"""


def test_a_takeover_is_on_the_console(tmp_path: Path) -> None:
    """The supervisor has no log yet. The note is on standard error, once, with the process id of the dead owner."""
    (tmp_path / "run").mkdir()
    dead = subprocess.Popen([sys.executable, "-c", DIES, str(tmp_path / "run")])
    assert dead.wait(60) == 0
    flags = ["--num-samples=128", "--epochs=1", "--global-batch-size=64", "--processes=1", "--track"]
    answer = paceline("train", "shapes-cnn", *flags, "--output-dir=run", cwd=tmp_path)
    assert answer.code == 0, answer
    assert (answer.out + answer.err).count(f"pid {dead.pid}") == 1, answer
