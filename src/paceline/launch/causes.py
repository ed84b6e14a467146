"""Finds the cause of a failure: from an exception, or from the exit code of a rank that left no exit record.

Our own errors carry their cause. Exceptions of Python have a type and an errno. Only the text of other libraries is
matched by pattern, in one table.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import Cause, EndsWithPrimary, PacelineError, text_of
from paceline.runtime.pulse import ATTEMPT_DIR
from paceline.runtime.resources import OPEN_FILES_HINT, THREADS_HINT
from paceline.runtime.this_rank import OWN_LAUNCHER, own_rank

_OF_ERRNO = {
    errno.ENOMEM: Cause.OUT_OF_MEMORY,
    errno.ENOSPC: Cause.STORAGE,
    errno.EDQUOT: Cause.STORAGE,
    errno.EMFILE: Cause.OPEN_FILES,
    errno.ENFILE: Cause.OPEN_FILES,
    errno.EADDRINUSE: Cause.PORT_TAKEN,
    errno.EPIPE: Cause.PEER_LOST,
    errno.ECONNRESET: Cause.PEER_LOST,
}
# What torch, gloo, NCCL and the C library write. The first match counts.
_OF_TEXT = tuple(
    (re.compile(pattern, re.IGNORECASE), cause)
    for pattern, cause in (
        (r"out of memory|can't allocate memory|cannot allocate memory", Cause.OUT_OF_MEMORY),
        (r"no space left|disk quota exceeded", Cause.STORAGE),
        (r"too many open files", Cause.OPEN_FILES),
        (r"can't start new thread|resource temporarily unavailable", Cause.THREADS),
        (r"bus error|/dev/shm|shared memory|unable to (open|write|mmap).*shm", Cause.SHARED_MEMORY),
        (r"address already in use|eaddrinuse", Cause.PORT_TAKEN),
        (
            r"connection (closed|reset) by peer|broken pipe|connection was likely closed|socket closed"
            r"|remote process exited|did the remote (server|peer) shutdown|gloo.*(closed|reset)"
            r"|nccl.*(remote|unhandled system) error",
            Cause.PEER_LOST,
        ),
        (r"timed out waiting|wait timeout|watchdog.*timeout|collective operation timeout", Cause.TIMEOUT),
    )
)
_MEMORY_HINT = "--auto-microbatch, a larger --accumulate, or --strategy fsdp"
# For the report: one sentence and one hint. The other causes come with an error that explains itself.
_EXPLANATIONS = {
    Cause.OUT_OF_MEMORY: ("the rank ran out of memory", _MEMORY_HINT),
    Cause.STORAGE: ("a disk is full", "free disk space, then --resume auto; --keep-last 1 needs less"),
    Cause.OPEN_FILES: ("a process may open no more files", OPEN_FILES_HINT),
    Cause.THREADS: ("no more threads or processes can be started", THREADS_HINT),
    Cause.SHARED_MEMORY: ("shared memory is too small", "a larger /dev/shm (docker run --shm-size=8g)"),
    Cause.PORT_TAKEN: ("another program uses the port", "start again: another port is chosen"),
    Cause.PEER_LOST: ("another rank has exited", "look at the logs of the other nodes"),
    Cause.TIMEOUT: ("a collective did not end in time", "is one node slow, or disconnected?"),
}
_LONGEST_CHAIN = 20
_MOST_TRACEBACK_LINES = 30


@dataclass(frozen=True)
class Explanation:
    """A cause, as the report describes it."""

    cause: Cause
    what: str = ""  # empty: the rank's own error says it
    hint: str | None = None


def cause_of(error: BaseException) -> Cause:
    """The first known cause among the error and the errors that it was raised from."""
    if isinstance(error, PacelineError | EndsWithPrimary):
        return error.cause
    if isinstance(error, KeyboardInterrupt):
        return Cause.PREEMPTED
    return next((cause for link in _chain(error) if (cause := _own_cause(link)) is not None), Cause.INTERNAL)


def is_consequence(error: BaseException) -> bool:
    """Whether another rank has failed before, and this error only says so."""
    return isinstance(error, EndsWithPrimary) or cause_of(error) is Cause.PEER_LOST


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _own_cause(error: BaseException) -> Cause | None:
    if isinstance(error, PacelineError):
        return error.cause
    if isinstance(error, MemoryError):
        return Cause.OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in _OF_ERRNO:
        return _OF_ERRNO[error.errno]
    text = text_of(error)
    return next((cause for pattern, cause in _OF_TEXT if pattern.search(text)), None)


def explain_error(cause: Cause, *, fitted: int) -> Explanation:
    """For a rank that has left an exit record. fitted: samples of the largest microbatch that fitted into memory."""
    what, hint = _EXPLANATIONS.get(cause, ("", None))
    return Explanation(cause, what + (_describe_fitted(fitted) if cause is Cause.OUT_OF_MEMORY else ""), hint)


def explain_exit_code(code: int | None, *, memory_mb: list[float], fitted: int, oom_kills: int) -> Explanation:
    """For a rank without an exit record. A negative code is the signal that has ended it; None: it never started.

    memory_mb: its resident memory over its last seconds. oom_kills: processes that the kernel killed for memory in this
    container during the attempt.
    """
    if code is None:
        return Explanation(Cause.INTERNAL)
    if code >= 0:
        hint = "does a function or a library of yours call os._exit?"
        return Explanation(Cause.RANK_EXITED, "the process exited before the run was finished", hint)
    if -code == signal.SIGBUS:
        what = "shared memory is too small, or a mapped file became shorter"
        return Explanation(Cause.SHARED_MEMORY, what, "a larger /dev/shm; for packed data: paceline data check")
    if -code != signal.SIGKILL:
        hint = "the stack may be in the rank's log; PYTHONFAULTHANDLER=1 shows it"
        return Explanation(Cause.RANK_CRASHED, f"crashed with {signal.Signals(-code).name}", hint)
    trend = f" (memory went from {memory_mb[0]:,.0f} to {memory_mb[-1]:,.0f} MB)" if len(memory_mb) > 1 else ""
    if oom_kills or (len(memory_mb) > 1 and memory_mb[-1] > 2 * memory_mb[0] + 256):
        killer = "by the kernel, out of memory" if oom_kills else "likely out of memory"
        what = f"killed, {killer}{trend}{_describe_fitted(fitted)}"
        return Explanation(Cause.OUT_OF_MEMORY, what, _MEMORY_HINT + ", or more memory for the job")
    return Explanation(Cause.RANK_KILLED, f"not sent by paceline{trend}", "see dmesg or the log of the scheduler")


def _describe_fitted(samples: int) -> str:
    return f"; the largest microbatch that fitted had {samples} samples" if samples else ""


# The exit record of a rank: why it ends, as JSON in the folder of the attempt. The supervisor reads it.


@dataclass(frozen=True)
class RankExit:
    exit_code: int
    cause: Cause
    is_consequence: bool  # another rank has failed before
    kind: str  # the exception's class
    what: str
    screen: str
    error: dict[str, Any] | None  # the same in parts, of an error of ours
    traceback: str
    time_s: float  # monotonic: of several, the first counts


def write_rank_exit(screen: str, code: int, error: BaseException) -> bool:
    """Tell the supervisor why this rank ends; False if there is none."""
    folder = os.environ.get(ATTEMPT_DIR)
    if folder is None or OWN_LAUNCHER not in os.environ:
        return False
    lines = "".join(traceback.format_exception(error)).splitlines()[-_MOST_TRACEBACK_LINES:]
    record = RankExit(
        exit_code=code,
        cause=cause_of(error),
        is_consequence=is_consequence(error),
        kind=type(error).__name__,
        what=_what(error, screen),
        screen=screen,
        error=error.to_json() if isinstance(error, PacelineError) else None,
        traceback="\n".join(lines),
        time_s=time.monotonic(),
    )
    path = _path(Path(folder), own_rank() or 0)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(record)))
    draft.rename(path)
    return True


def _what(error: BaseException, screen: str) -> str:
    return screen if isinstance(error, EndsWithPrimary) else text_of(error) or screen


def _path(attempt_dir: Path, rank: int) -> Path:
    return attempt_dir / f"rank-{rank}.exit"


def read_rank_exit(attempt_dir: Path, rank: int) -> RankExit | None:
    try:
        content = json.loads(_path(attempt_dir, rank).read_text())
        return RankExit(**{**content, "cause": Cause(content["cause"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
