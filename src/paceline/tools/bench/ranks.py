"""Starts the ranks of a benchmark on this node, and ends them with it."""

from __future__ import annotations

import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from paceline.errors import EXIT_FINISHED, EXIT_INTERRUPTED
from paceline.launch.attempt import (
    Attempt,
    AttemptEnd,
    Attempts,
    RankMain,
    end_fork_server,
    interrupts_held_back,
)
from paceline.launch.report import report_failure
from paceline.runs.folder import RunFolder
from paceline.runtime.detect import Nodes

_SIGNAL_EXIT = 128  # a shell's exit code for "ended by signal N" is this plus N


class _Stopped(BaseException):
    """A signal requests a stop."""


@dataclass(frozen=True)
class LocalRanks:
    """The ranks to start. Each runs the same command."""

    processes: int
    threads: int
    nodes: Nodes
    rank_main: RankMain
    arguments: list[str]


def run_ranks(ranks: LocalRanks) -> int:
    """Returns the exit code for the shell. There is nothing to save, so a stop is immediate. There are no restarts."""
    attempts = Attempts(ranks.threads)
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        attempts.stop_ranks(signal.SIGKILL)
        if not asked:  # the cleanup that follows must not be interrupted
            asked.append(number)
            end_fork_server()  # first: a rank that is still starting would fail with BrokenPipe otherwise
            raise _Stopped

    try:
        with interrupts_held_back():
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(name, stop)
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
            folder = RunFolder(Path(scratch))
            end = attempts.run(
                Attempt(1, ranks.processes, ranks.rank_main, ranks.arguments, folder.log_of, ranks.nodes)
            )
            if not asked:
                return EXIT_FINISHED if end.is_finished else _tell_failure(end, folder)
    except _Stopped:
        pass
    print("\ninterrupted" if asked == [signal.SIGINT] else "\nstopped", file=sys.stderr)
    return EXIT_INTERRUPTED if asked == [signal.SIGINT] else _SIGNAL_EXIT + asked[0]


def _tell_failure(end: AttemptEnd, folder: RunFolder) -> int:
    report = report_failure(end, folder, attempt=1, attempts=1, oom_kills=0)
    if "--debug" in sys.argv and report.traceback:
        print(report.traceback, file=sys.stderr)
    if report.screen:  # the rank's own error screen
        print(report.screen, file=sys.stderr)
    else:
        print(f"error: {report.what}\n  where:   rank {report.rank} on {report.host}", file=sys.stderr)
    return report.exit_code
