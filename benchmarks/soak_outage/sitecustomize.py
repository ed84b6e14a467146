"""A disk that does not answer for a while: loaded by every Python process of a soak, through PYTHONPATH.

While the file named by SOAK_OUTAGE exists, calls on paths below SOAK_DISK fail with ETIMEDOUT, and so does every
fsync. Only Python's own calls are covered; files that are open already can still be read and written.
"""

import builtins
import errno
import io
import os
from collections.abc import Callable
from typing import Any

_SWITCH, _DISK = os.environ.get("SOAK_OUTAGE", ""), os.environ.get("SOAK_DISK", "")
_BY_PATH = ("open", "stat", "lstat", "scandir", "listdir", "mkdir", "rmdir", "unlink", "remove", "readlink")
_BY_TWO_PATHS = ("rename", "replace", "symlink", "link")
_is_there = os.access  # not replaced below


def _is_ours(path: Any) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.path.abspath(os.fsdecode(path)).startswith(_DISK)  # noqa: PTH100 - touches no disk


def _failing(call: Callable[..., Any], paths: int) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if _is_there(_SWITCH, os.F_OK) and (paths == 0 or any(map(_is_ours, arguments[:paths]))):
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), arguments[0] if paths else None)
        return call(*arguments, **named)

    return wrapped


if _SWITCH and _DISK:
    for _name in _BY_PATH:
        setattr(os, _name, _failing(getattr(os, _name), 1))
    for _name in _BY_TWO_PATHS:
        setattr(os, _name, _failing(getattr(os, _name), 2))
    os.fsync = _failing(os.fsync, 0)
    builtins.open = io.open = _failing(io.open, 1)
