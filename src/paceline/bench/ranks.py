"""Start the ranks of a benchmark on this node, and see to it that none outlives it."""

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
from paceline.world.detect import Nodes

_SIGNAL_EXIT = 128  # a shell's exit code for "ended by signal N" is this plus N


class _Stopped(BaseException):
    """A signal asked for the end."""


@dataclass(frozen=True)
class LocalRanks:
    """What to start; each rank is the same command again."""

    processes: int
    threads: int
    nodes: Nodes
    rank_main: RankMain
    arguments: list[str]


def run_ranks(ranks: LocalRanks) -> int:
    """Returns the exit code for the shell. Nothing is saved, so a stop is immediate and nothing is tried again."""
    attempts = Attempts(ranks.threads)
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        attempts.stop_ranks(signal.SIGKILL)
        if not asked:  # the agent's own cleaning up, which follows, must not be torn
            asked.append(number)
            end_fork_server()  # before anything unwinds: who is being born would miss it, and complain
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
    if report.screen:  # it explains itself
        print(report.screen, file=sys.stderr)
    else:
        print(f"error: {report.what}\n  where:   rank {report.rank} on {report.host}", file=sys.stderr)
    return report.exit_code
