"""A disk that fails for a while, or a process that is killed in the middle of what it writes."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "symlink", "unlink", "rmdir", "scandir", "readlink")


_pauses: list[None] = []


@contextmanager
def working() -> Iterator[None]:
    """The disk works in this block, for checks by the test itself."""
    _pauses.append(None)
    try:
        yield
    finally:
        _pauses.pop()


class Killed(BaseException):
    """The process is killed here. It writes nothing more, also not during cleanup."""


@contextmanager
def failing(number: int | None, *, after: int, operations: int) -> Iterator[None]:
    """After some successful file operations, the next ones fail with an error number. None: the process is killed."""
    count = 0
    replaced = {name: getattr(os, name) for name in _CALLS}
    real_open = io.open

    def fail_if_due(path: Any) -> None:
        nonlocal count
        if _pauses:
            return
        count += 1
        if number is None and count > after:
            raise Killed
        if number is not None and after < count <= after + operations:
            raise OSError(number, os.strerror(number), path if isinstance(path, str) else None)

    def failing_call(name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            fail_if_due(arguments[0] if arguments else None)
            return replaced[name](*arguments, **options)

        return call

    def failing_open(file: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(file, int) and not str(file).startswith("/proc/"):
            fail_if_due(file)
        return real_open(file, *arguments, **options)

    try:
        for name in _CALLS:
            setattr(os, name, failing_call(name))
        io.open = builtins.open = failing_open  # type: ignore[assignment]
        yield
    finally:
        io.open = builtins.open = real_open
        for name, function in replaced.items():
            setattr(os, name, function)
