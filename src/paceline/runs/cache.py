"""The cache folder: measured ceilings, compiled code, bytecode, downloaded weights. All of it can be recreated."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$PACELINE_CACHE, else $XDG_CACHE_HOME/paceline, else ~/.cache/paceline."""
    base = os.environ.get("PACELINE_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
