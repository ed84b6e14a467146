"""Keeps Python's bytecode in our cache if it is not kept elsewhere.

Container images often set PYTHONDONTWRITEBYTECODE, and some installers write no __pycache__ folders. Python then
compiles the modules of torch (3,500 with its compiler) in every process of every run, which takes a rank about ten
seconds.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from paceline.runs.cache import cache_folder


def keep_bytecode() -> None:
    """For this process and those it starts. Call it before torch is loaded."""
    if "torch" in sys.modules or sys.pycache_prefix or not _is_compiled_every_time():
        return
    folder = cache_folder() / "bytecode"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # every process compiles, as before
        return
    if os.access(folder, os.W_OK):
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False


def _is_compiled_every_time() -> bool:
    """Whether torch has no bytecode beside it and will not get any."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or torch.cached is None or Path(torch.cached).exists():
        return False
    return sys.dont_write_bytecode or not os.access(Path(torch.origin).parent, os.W_OK)
