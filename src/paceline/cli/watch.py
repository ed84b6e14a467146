"""`paceline watch RUN`: its status, again and again, until it has ended. Ctrl-C ends the watching, not the run."""

from __future__ import annotations

import sys
import time

from paceline.cli.plain_output import unfiltered
from paceline.cli.status import RunView, describe, look, parse_run_arguments
from paceline.errors import EXIT_FINISHED, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_PREEMPTED, UserError
from paceline.metrics.screen import FOLDED, UNFOLDED, is_live, width_of

_USAGE = """\
usage: paceline watch RUN [--every S]

What `paceline status` says, renewed every S seconds (5; 1 for a run that has no job) until the run has ended. RUN is a
folder, which may be written by another machine, or the id or name of a Slurm job. Ends with 0 if it finished, 75 if it
was stopped and saved, else with the exit code of its last failure. Ctrl-C leaves the run alone.
"""
_EVERY_S = 1.0
_EVERY_OF_JOB_S = 5.0  # every look asks the scheduler, which serves others too


def run(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return EXIT_FINISHED
    folder, flags = parse_run_arguments(arguments, "watch", valued=("--every",))
    every_s = _seconds(flags.get("--every"))
    shown = ""
    try:
        while True:
            view = look(folder)
            shown = _show(describe(view), shown)
            if view.is_over:
                return _exit_code(view)
            time.sleep(every_s if every_s is not None else _EVERY_S if view.record is None else _EVERY_OF_JOB_S)
    except KeyboardInterrupt:
        print(f"\nno longer watched; {folder.path} goes on (paceline cancel {folder.path} stops it)")
        return EXIT_INTERRUPTED


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 86400:
        raise UserError("--every takes seconds", got=text, allowed="0 or more")
    return seconds


def _show(text: str, before: str) -> str:
    """In place on a terminal; elsewhere one block per change, the age of the last sign of life not counted."""
    if is_live(sys.stdout):
        width = width_of(sys.stdout)
        # A window that has become narrower has folded what stood there.
        rows = sum(max(len(line) - 1, 0) // width + 1 for line in before.splitlines())
        lines = [line[: width - 1] for line in text.splitlines()]
        up = f"\x1b[{rows}A" if rows else ""
        drawn = up + UNFOLDED + "".join(f"\x1b[2K{line}\n" for line in lines) + FOLDED + "\x1b[J"
        print(drawn, end="", flush=True, file=unfiltered(sys.stdout))
        return "\n".join(lines)
    if _without_passing(text) != _without_passing(before):
        print(text, flush=True)
    return text


def _without_passing(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(("  updated:", "  now:"))]


def _exit_code(view: RunView) -> int:
    if view.state == "finished":
        return EXIT_FINISHED
    if view.state == "ended" and view.job is not None:
        return EXIT_FINISHED if {view.job.state, *view.job.tasks} == {"COMPLETED"} else EXIT_INTERNAL
    if view.state == "preempted":
        return EXIT_PREEMPTED
    code = view.failure.get("exit_code")
    if code is None and view.is_kubernetes and view.job is not None and view.job.exit_code.isdecimal():
        code = int(view.job.exit_code)
    return code if isinstance(code, int) and 0 < code < 256 else EXIT_INTERNAL
