"""This process as a rank: its number, an early `os._exit`, and torchrun's error file. Every command imports it."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import Cause, UserError

OWN_LAUNCHER = "PACELINE_LAUNCHER"  # set by our supervisor for the ranks it starts
_reports: list[Callable[[str], None]] = []
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# torchrun takes the failure with the earliest whole second for the root cause. A rank that fails because another rank
# has failed may write its file within the same second.
_CONSEQUENCE_DELAY_S = 2


def own_rank() -> int | None:
    """None in a process that is no rank, such as the supervisor."""
    text = os.environ.get("RANK")
    return int(text) if text and text.isdecimal() else None


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
    """In this context, `os._exit` called by other code ends this process with the code that `show` returns.

    `os._exit` in the user's functions ends a process immediately, and code 0 would look like a finished run. Our
    supervisor expects an exit record from each rank. torchrun and srun use only the exit code. An exit by other means
    (a C library) is not detected here.
    """
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


def leave_error_file(
    screen: str, code: int, *, is_consequence: bool = False, environment: Mapping[str, str] = os.environ
) -> bool:
    """Write the message for torchrun's summary. False without torchrun, and if the file cannot be written.

    Without it, torchrun prints its own traceback and a summary that does not say why the rank failed.
    is_consequence: another rank's failure or a signal ended this rank.
    """
    path = _path(environment)
    if path is None:
        return False
    extra = {"py_callstack": screen, "timestamp": str(int(time.time()) + is_consequence * _CONSEQUENCE_DELAY_S)}
    content = {"message": {"message": screen, "extraInfo": extra, "errorCode": code}}
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        # By rename: torchrun itself fails if it reads an incomplete file.
        draft.write_text(json.dumps(content))
        draft.rename(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        return False
    return True


def is_summary_expected(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun prints the error file of this rank, so the rank does not have to print the message itself.

    torchrun prints it only after the last attempt. If each rank has its own output file, the rank prints it there too.
    """
    path = _path(environment)
    if path is None or (path.parent / "stderr.log").exists():
        return False
    attempts = [environment.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    return all(text.isdecimal() for text in attempts) and int(attempts[0]) >= int(attempts[1])


def _path(environment: Mapping[str, str]) -> Path | None:
    name = environment.get(_ERROR_FILE, "")
    return Path(name) if name and OWN_LAUNCHER not in environment else None
