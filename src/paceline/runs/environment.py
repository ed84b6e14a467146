"""The origin of a run: command, code version and machine, written to its folder."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import paceline
from paceline.errors import printable_line

_PACKAGES = ("torch", "numpy", "safetensors", "torchvision", "timm")


def describe_environment() -> dict[str, Any]:
    return {
        "paceline": paceline.__version__,
        "python": platform.python_version(),
        "packages": versions_of_packages(),
        "platform": platform.platform(),
        "command": [printable_line(word) for word in sys.argv],
        "folder": printable_line(str(Path.cwd())),
        "git": _git_state(),
    }


def versions_of_packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git_state() -> dict[str, Any] | None:
    """Commit and dirty flag of the folder the run was started in; None outside of a repository."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}


def _git(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
