"""Run the `paceline` command like a user: in a separate process and folder."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
