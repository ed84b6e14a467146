"""Runs the ranks of `bench` and `doctor`: one attempt with nothing to save, so a stop is immediate."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from paceline.errors import EXIT_FINISHED, EXIT_INTERRUPTED
from paceline.launch.attempt import Attempt, Attempts, RankMain
from paceline.launch.rank_processes import end_fork_server, signals_blocked
from paceline.launch.report import FailureReport, report_failure
from paceline.runs.folder import RunFolder
from paceline.runtime.detect import Nodes

_SIGNAL_EXIT = 128  # a shell's exit code for "ended by signal N" is this plus N


class _Stopped(BaseException):
    """A signal requests a stop."""


@dataclass(frozen=True)
class AttemptEnd:
    """How the ranks of this node ended. Finished if nothing else is set."""

    failure: FailureReport | None = None
    stopped_by: int | None = None  # a signal
    is_late: bool = False  # they were ended at the time limit

    @property
    def exit_code(self) -> int:
        """For the shell."""
        if self.stopped_by is not None:
            return EXIT_INTERRUPTED if self.stopped_by == signal.SIGINT else _SIGNAL_EXIT + self.stopped_by
        return EXIT_FINISHED if self.failure is None else self.failure.exit_code

    def print_error(self, *, with_traceback: bool = False) -> None:
        """Say on standard error why the ranks did not finish."""
        if self.stopped_by is not None:
            print("\ninterrupted" if self.stopped_by == signal.SIGINT else "\nstopped", file=sys.stderr)
        if self.failure is None:
            return
        if with_traceback and self.failure.traceback:
            print(self.failure.traceback, file=sys.stderr)
        where = f"rank {self.failure.rank} on {self.failure.host}"
        print(self.failure.screen or f"error: {self.failure.what}\n  where:   {where}", file=sys.stderr)


def run_single_attempt(
    rank_main: RankMain,
    arguments: list[str],
    *,
    processes: int,
    threads: int,
    nodes: Nodes | None = None,
    limit_s: float | None = None,
) -> AttemptEnd:
    """Run the same command on the ranks of this node, to its end. limit_s: end them after this time."""
    attempts = Attempts(threads)
    received: list[int] = []
    late = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        attempts.stop_ranks(signal.SIGKILL)
        if not received:  # a second signal must not interrupt the cleanup
            received.append(number)
            end_fork_server()  # first: a rank that is still starting would fail with BrokenPipe otherwise
            raise _Stopped

    def stop_late() -> None:
        late.set()
        os.kill(os.getpid(), signal.SIGTERM)  # the main thread may wait for a rank

    timer = threading.Timer(limit_s or 0.0, stop_late)
    timer.daemon = True
    try:
        with signals_blocked(signal.SIGINT):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, stop)
        if limit_s is not None:
            timer.start()
        with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as scratch:
            folder = RunFolder(Path(scratch))
            attempt = Attempt(1, processes, rank_main, arguments, folder.log_of, nodes or Nodes(), can_save=False)
            end = attempts.run(attempt)
            if not received:
                if end.is_finished:
                    return AttemptEnd()
                return AttemptEnd(report_failure(end, folder, attempt=1, attempts=1, oom_kills=0))
    except _Stopped:
        pass
    finally:
        timer.cancel()
    return AttemptEnd(is_late=True) if late.is_set() else AttemptEnd(stopped_by=received[0])
