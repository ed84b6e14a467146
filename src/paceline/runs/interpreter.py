"""How Paceline starts further Python processes: a file in the working folder never takes the place of a module.

`python -m` and `python -c` put the working folder first on the path. A `random.py` of the user, or of somebody else,
would then be imported instead of Python's own. The command `paceline` itself does not look there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SAFE_PATH = "PYTHONSAFEPATH"
_OURS = "paceline"  # any value works; this one shows who has set it


def python_command(*arguments: str) -> list[str]:
    """Python with the path of this process: with the working folder only if this process has it, too."""
    working_folder = {""}
    with suppress(FileNotFoundError):  # it may have been removed
        working_folder.add(str(Path.cwd()))
    has_working_folder = not working_folder.isdisjoint(sys.path)
    return [sys.executable, *([] if has_working_folder else ["-P"]), *arguments]


@contextmanager
def safe_path() -> Iterator[None]:
    """Processes that multiprocessing starts inside do not look in the working folder, until they get our path."""
    is_set = _SAFE_PATH in os.environ
    os.environ.setdefault(_SAFE_PATH, _OURS)
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(_SAFE_PATH, None)


def forget_safe_path() -> None:
    """In such a process: programs that user code starts run as usual."""
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]
