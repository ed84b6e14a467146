"""Detects `os._exit` in the user's functions. It ends a process immediately, and code 0 would look like a finished run.

Our supervisor expects an exit record from each rank. torchrun and srun use only the exit code, so `os._exit` is
replaced during the work. An exit by other means (a C library) is not detected here.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from paceline.errors import Cause, UserError

_reports: list[Callable[[str], None]] = []


@contextmanager
def reported_to(report: Callable[[str], None]) -> Iterator[None]:
    """`report` is called with the reason before this process ends early."""
    _reports.append(report)
    try:
        yield
    finally:
        _reports.remove(report)


@contextmanager
def early_exits_fail(show: Callable[[UserError], int]) -> Iterator[None]:
    """In this context, `os._exit` called by other code ends this process with the code that `show` returns."""
    process, exit_now = os.getpid(), os._exit

    def exit_with_error(status: int) -> None:
        caller = sys._getframe(1)
        is_ours = str(caller.f_globals.get("__name__", "")).partition(".")[0] == "paceline"
        if is_ours or os.getpid() != process:  # forked processes, for example of multiprocessing, end like this
            exit_now(status)
        error = _explain(status, traceback.extract_stack(caller)[-1])
        code = error.exit_code
        try:
            for report in _reports:
                with suppress(Exception):
                    report(error.what)
            code = show(error)
        finally:
            exit_now(code)

    os._exit = exit_with_error  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = exit_now


def _explain(status: int, caller: traceback.FrameSummary) -> UserError:
    return UserError(
        "os._exit was called before the work was done",
        where=f"{caller.filename}, line {caller.lineno}",
        got=f"os._exit({status})",
        hint="raise an exception if a function cannot continue",
        cause=Cause.USER_CODE,
    )
