"""The errors of Paceline: causes, exit codes and the error screen.

An error screen has five parts in a fixed order: what is wrong, where, what was found, what is allowed, and what to try.
The class of an error decides the exit code, its cause decides about restarts. This module imports no other module of
the package, so every layer can raise these errors.
"""

from __future__ import annotations

import re
import traceback
from enum import StrEnum
from typing import Any

EXIT_FINISHED = 0
EXIT_DIFFERENT = 1  # runs that were compared differ
EXIT_USER = 2
EXIT_DATA = 3
EXIT_CHECKPOINT = 4
EXIT_NON_FINITE = 5
EXIT_HANG = 6
EXIT_OWNER_LOST = 7
EXIT_CORRUPTION = 8
EXIT_INTERNAL = 70
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class Cause(StrEnum):
    """Why a run has failed: `cause` in failure.json. The restart policy decides by it (launch/policy.py)."""

    USER_INPUT = "user-input"  # a flag, a recipe or a path is wrong
    USER_CODE = "user-code"  # a function of the user's own failed, or ended the process
    NOT_SHARED = "not-shared"  # the nodes of the run do not see the same folder
    DATA = "data"  # a data set or a weights file is missing, truncated or unreadable
    CHECKPOINT = "checkpoint"  # a checkpoint cannot be written, found or trusted
    BAD_NUMBERS = "bad-numbers"  # the loss or a gradient is not finite
    CORRUPTION = "corruption"  # an audit found a rank that computes wrong bits; it is left out
    OWNER_LOST = "owner-lost"  # another process owns the run folder now
    PREEMPTED = "preempted"  # a user or a scheduler requested the end
    RENDEZVOUS = "rendezvous"  # ranks or nodes did not find each other at the start
    PEER_LOST = "peer-lost"  # another rank has exited; never the first cause
    TIMEOUT = "timeout"  # a collective of torch did not end in time
    HANG = "hang"  # a rank made no progress before its deadline
    OUT_OF_MEMORY = "out-of-memory"  # an allocation failed, or the kernel killed the rank for its memory
    SHARED_MEMORY = "shared-memory"  # /dev/shm is too small, or a mapped file became shorter
    STORAGE = "storage"  # a disk or a quota is full
    OPEN_FILES = "open-files"  # the process may open no more files
    THREADS = "threads"  # no more threads or processes can be started
    PORT_TAKEN = "port-taken"  # another program listens at the port
    RANK_KILLED = "rank-killed"  # by a SIGKILL that Paceline has not sent
    RANK_CRASHED = "rank-crashed"  # by another signal, such as SIGSEGV
    RANK_EXITED = "rank-exited"  # without an error and before the run was finished
    INTERNAL = "internal"  # an exception that Paceline does not expect; the traceback says more


# C0 and C1 control characters (but tab and newline), line and paragraph separators, bidirectional embeddings, overrides
# and isolates, and lone surrogates: how Python holds bytes of a file name that are not UTF-8.
_UNSAFE_ON_A_TERMINAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text from a file or a name, safe to print: escape sequences become visible, newlines and tabs stay."""
    return _UNSAFE_ON_A_TERMINAL.sub(_escape, text)


def printable_line(text: str) -> str:
    """The same on one line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class PacelineError(Exception):
    """An expected failure: explained on one screen, without a traceback."""

    exit_code = EXIT_INTERNAL
    cause = Cause.INTERNAL  # of the class; an error can have another one

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object | None = None,
        allowed: str | None = None,
        hint: str | None = None,
        cause: Cause | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.cause = cause or self.cause
        self.where = where
        self.got = got
        self.allowed = allowed
        self.hint = hint

    def __str__(self) -> str:
        """All parts, for an exception that is caught in Python. `what` is the first of them."""
        return self.screen().removeprefix("error: ")

    def screen(self) -> str:
        """The message for users. Unknown parts are left out."""
        parts = [("where", self.where), ("got", self.got), ("allowed", self.allowed), ("try", self.hint)]
        lines = [f"error: {printable(self.what)}"]
        for label, value in parts:
            if value is not None:
                indented = printable(str(value)).replace("\n", "\n" + " " * 11)
                lines.append(f"  {label + ':':<8} {indented}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """For another process; `error_from_json` makes the same error of it."""
        got = None if self.got is None else str(self.got)
        parts = {"what": self.what, "where": self.where, "got": got, "allowed": self.allowed, "hint": self.hint}
        return {"kind": type(self).__name__, "exit_code": self.exit_code, "cause": self.cause, **parts}


class UserError(PacelineError):
    """A flag, a recipe or a path is wrong. Found before any work starts."""

    exit_code = EXIT_USER
    cause = Cause.USER_INPUT


class DataError(PacelineError):
    """A data set or a weights file is missing, truncated or unreadable."""

    exit_code = EXIT_DATA
    cause = Cause.DATA


class UnavailableData(DataError):
    """The storage of the data fails, or holds other files than at the start. No picture counts as unreadable for it."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be written, found or trusted."""

    exit_code = EXIT_CHECKPOINT
    cause = Cause.CHECKPOINT


class Preempted(PacelineError):
    """The run was asked to stop, and has saved."""

    exit_code = EXIT_PREEMPTED
    cause = Cause.PREEMPTED


class NonFiniteError(PacelineError):
    """The loss or a gradient stopped being a number."""

    exit_code = EXIT_NON_FINITE
    cause = Cause.BAD_NUMBERS


class CorruptionError(PacelineError):
    """An audit found gradients that other ranks do not confirm."""

    exit_code = EXIT_CORRUPTION
    cause = Cause.CORRUPTION
    rank: int | None = None  # the faulty one; None: the audit cannot tell

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "rank": self.rank}


class OwnerLost(PacelineError):
    """Another process owns the run now. Nothing more may be written."""

    exit_code = EXIT_OWNER_LOST
    cause = Cause.OWNER_LOST


_KINDS = {
    kind.__name__: kind
    for kind in (UserError, DataError, CheckpointError, Preempted, NonFiniteError, CorruptionError, OwnerLost)
}


def error_kind(exit_code: int) -> type[PacelineError]:
    """The class of errors with this exit code; PacelineError if there is none."""
    return next((kind for kind in _KINDS.values() if kind.exit_code == exit_code), PacelineError)


def error_from_json(content: dict[str, Any]) -> PacelineError:
    """The error that a process of ours has written with `to_json`."""
    kind = _KINDS.get(content["kind"], PacelineError)
    parts = {name: content[name] for name in ("where", "got", "allowed", "hint")}
    error = kind(content["what"], **parts, cause=Cause(content["cause"]))
    error.exit_code = int(content["exit_code"])
    if isinstance(error, CorruptionError):
        error.rank = content.get("rank")
    return error


def text_of(error: BaseException) -> str:
    """The message of any exception. One of the user's own may fail in its `__str__`."""
    if isinstance(error, PacelineError):
        return error.what
    try:
        return str(error)
    except BaseException as fault:
        return f"(no message: its __str__ raised {type(fault).__name__})"


class EndsWithPrimary(SystemExit):
    """The primary has failed and prints why; this rank ends with its exit code and prints nothing."""

    def __init__(self, code: int, screen: str) -> None:
        super().__init__(code)
        self.screen = screen  # of the primary's error
        self.cause = error_kind(code).cause


def explain_exit(error: BaseException) -> UserError:
    """For a user's function that calls `sys.exit` or raises an exception of the interpreter, such as GeneratorExit.

    Its exit code does not describe the run.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else None
    name = type(error).__name__
    is_exit = isinstance(error, SystemExit)
    text = str(error.code) if isinstance(error, SystemExit) else text_of(error)
    return UserError(
        "sys.exit was called before the work was done" if is_exit else f"{name} was raised before the work was done",
        where=where,
        got=f"{name}: {text}".removesuffix(": "),
        hint="a function that cannot continue raises an exception" + ("" if is_exit else ", a subclass of Exception"),
        cause=Cause.USER_CODE,
    )
