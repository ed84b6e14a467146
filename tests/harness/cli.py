"""Run the `paceline` command like a user: in a separate process and folder. And check what it shows."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import EXIT_USER

MOST_SCREEN_LINES = 12
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str
    # User plus system time, because other programs affect the wall clock. NaN if it was not measured.
    cpu_s: float = field(default=math.nan, compare=False)


def environment(**extra: str) -> dict[str, str]:
    """The test's environment without variables of a launcher. Python warnings are errors."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    return {**clean, "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", **extra}


def paceline(
    *arguments: str, cwd: Path, timeout_s: float = 100, env: Mapping[str, str] | None = None, **more_env: str
) -> Answer:
    words = (sys.executable, "-m", "paceline", *arguments)
    return command(*words, cwd=cwd, timeout_s=timeout_s, env={**(env or {}), **more_env})


def command(
    *arguments: str, cwd: Path, timeout_s: float = 100, env: Mapping[str, str] | None = None, **more_env: str
) -> Answer:
    before_s = _cpu_of_children()
    done = subprocess.run(
        arguments,
        cwd=cwd,
        env=environment(**(env or {}), **more_env),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr, _cpu_of_children() - before_s)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """All output of a command that runs in this process."""
    assert main(list(arguments)) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def assert_one_screen(screen: str, *parts: str) -> None:
    """One error screen, of a few lines, with these parts."""
    screen = screen.strip()
    assert screen.startswith("error: "), screen
    assert screen.count("error: ") == 1, screen
    assert "Traceback" not in screen
    assert len(screen.splitlines()) <= MOST_SCREEN_LINES, screen
    for part in parts:
        assert part in screen, screen


def assert_refused(answer: Answer, code: int, *parts: str) -> None:
    """A mistake of the user: an exit code and one error screen."""
    assert answer.code == code, answer
    assert "Traceback" not in answer.out
    assert_one_screen(answer.err, *parts)


def assert_nothing_starts(
    capsys: pytest.CaptureFixture[str], folder: Path, arguments: Sequence[str], *parts: str
) -> None:
    """A command in this process, in an empty working folder: refused, and nothing is written."""
    assert main(list(arguments)) == EXIT_USER
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_one_screen(captured.err, *parts)
    assert list(folder.iterdir()) == []


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
