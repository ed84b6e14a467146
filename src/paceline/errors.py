"""Every way a run can end badly, and the one screen a person sees when it does.

A message answers five questions in a fixed order: what is wrong, where it stands, what was found,
what would have been right, and what to do next. The class decides the process's exit code. Imports
nothing, so that every layer may raise these.
"""

from __future__ import annotations

EXIT_FINISHED = 0
EXIT_DIFFERENT = 1  # runs that were compared differ
EXIT_USER = 2
EXIT_DATA = 3
EXIT_CHECKPOINT = 4
EXIT_NON_FINITE = 5
EXIT_HANG = 6
EXIT_INTERNAL = 70
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class PacelineError(Exception):
    """An expected failure: explained on one screen, without a traceback."""

    exit_code = EXIT_INTERNAL

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: object | None = None,
        allowed: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.got = got
        self.allowed = allowed
        self.hint = hint

    def screen(self) -> str:
        """The message as a person reads it; parts that are not known are left out."""
        parts = [("where", self.where), ("got", self.got), ("allowed", self.allowed), ("try", self.hint)]
        lines = [f"error: {self.what}"]
        for label, value in parts:
            if value is not None:
                indented = str(value).replace("\n", "\n" + " " * 11)
                lines.append(f"  {label + ':':<8} {indented}")
        return "\n".join(lines)


class UserError(PacelineError):
    """A flag, a recipe or a path is wrong. Found before any work starts."""

    exit_code = EXIT_USER


class DataError(PacelineError):
    """A data set or a weights file is missing, truncated or unreadable."""

    exit_code = EXIT_DATA


class CheckpointError(PacelineError):
    """A checkpoint cannot be written, found or trusted."""

    exit_code = EXIT_CHECKPOINT


class Preempted(PacelineError):
    """The run was asked to stop, and has saved."""

    exit_code = EXIT_PREEMPTED


class NonFiniteError(PacelineError):
    """The loss or a gradient stopped being a number."""

    exit_code = EXIT_NON_FINITE
