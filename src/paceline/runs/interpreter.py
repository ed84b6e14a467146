"""How Paceline starts Python processes so that a file in the working folder never replaces a module.

`python -m` and `python -c` put the working folder first on the path. A file `random.py` there would then be imported
instead of Python's own module. The command `paceline` itself does not import from the working folder.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.settings.values import cache_folder

SAFE_PATH = "PYTHONSAFEPATH"
_ONE_AT_A_TIME = threading.RLock()  # a thread must not remove the variable while another starts a process
OURS = "paceline"  # any value works; this one shows that Paceline set it


def python_command(*arguments: str) -> list[str]:
    """The command to start Python. The child imports from the working folder only if this process does."""
    return [sys.executable, *([] if has_working_folder() else ["-P"]), *arguments]


def has_working_folder() -> bool:
    """Whether this process itself imports modules from the working folder, as in a notebook or a script there."""
    working_folder = {""}
    with suppress(FileNotFoundError):  # it may have been removed
        working_folder.add(str(Path.cwd()))
    return not working_folder.isdisjoint(sys.path)


@contextmanager
def safe_path() -> Iterator[None]:
    """Processes that multiprocessing starts in this block do not import from the working folder during start-up."""
    with _ONE_AT_A_TIME:
        is_set = SAFE_PATH in os.environ
        os.environ.setdefault(SAFE_PATH, OURS)
        try:
            yield
        finally:
            if not is_set:
                os.environ.pop(SAFE_PATH, None)


def forget_safe_path() -> None:
    """Called in such a process, so that programs started by user code run as usual."""
    if os.environ.get(SAFE_PATH) == OURS:
        del os.environ[SAFE_PATH]


# Keeps Python's bytecode in our cache if it is not kept elsewhere.
#
# Container images often set PYTHONDONTWRITEBYTECODE, and some installers write no __pycache__ folders. Python then
# compiles the modules of torch (3,500 with its compiler) in every process of every run, which takes a rank about ten
# seconds.


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
