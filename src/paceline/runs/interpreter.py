"""How Paceline starts further Python processes: a file in the working folder never takes the place of a module.

`python -m` and `python -c` put the working folder first on the path. A `random.py` of the user, or of somebody else,
would then be imported instead of Python's own. The command `paceline` itself does not look there.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"
_ONE_AT_A_TIME = threading.RLock()  # a thread must not remove the variable while another starts a process
OURS = "paceline"  # any value works; this one shows who has set it


def python_command(*arguments: str) -> list[str]:
    """Python with the path of this process: with the working folder only if this process has it, too."""
    return [sys.executable, *([] if has_working_folder() else ["-P"]), *arguments]


def has_working_folder() -> bool:
    """Whether this process itself imports modules from the working folder, as in a notebook or a script there."""
    working_folder = {""}
    with suppress(FileNotFoundError):  # it may have been removed
        working_folder.add(str(Path.cwd()))
    return not working_folder.isdisjoint(sys.path)


@contextmanager
def safe_path() -> Iterator[None]:
    """Processes that multiprocessing starts inside do not look in the working folder, until they get our path."""
    with _ONE_AT_A_TIME:
        is_set = SAFE_PATH in os.environ
        os.environ.setdefault(SAFE_PATH, OURS)
        try:
            yield
        finally:
            if not is_set:
                os.environ.pop(SAFE_PATH, None)


def forget_safe_path() -> None:
    """In such a process: programs that user code starts run as usual."""
    if os.environ.get(SAFE_PATH) == OURS:
        del os.environ[SAFE_PATH]
