"""An outage of the storage in every Python process of a command, for as long as a switch file exists.

Put this folder on PYTHONPATH. OUTAGE is JSON: `switch` (a path), `errno`, `match` (a regular expression that a whole
path must match to be affected).
"""

import builtins
import io
import json
import os
import re
from collections.abc import Callable
from typing import Any

_OUTAGE = json.loads(os.environ.get("OUTAGE", "{}"))
_CALLS = (
    *("open", "scandir", "listdir", "lstat", "stat", "readlink"),
    *("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "symlink", "link"),
)
_exists = os.path.exists


def _failing(call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        path = arguments[0] if arguments else "."
        if isinstance(path, str | os.PathLike) and _pattern.fullmatch(os.path.abspath(path)) and _is_on():  # noqa: PTH100 - without a look at the disk
            raise OSError(_OUTAGE["errno"], os.strerror(_OUTAGE["errno"]), os.fspath(path))
        return call(*arguments, **named)

    return wrapped


def _is_on() -> bool:
    try:
        _stat(_OUTAGE["switch"])
    except FileNotFoundError:
        return False
    return True


if _OUTAGE:
    _stat = os.stat
    _pattern = re.compile(_OUTAGE["match"])
    for _name in _CALLS:
        setattr(os, _name, _failing(getattr(os, _name)))
    builtins.open = io.open = _failing(io.open)  # type: ignore[assignment]
