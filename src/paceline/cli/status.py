"""`paceline status`, `paceline watch` and `paceline cancel`: show where a run is, follow it, stop it."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass
from typing import Annotated

from paceline.cli.command import Command
from paceline.cli.run_view import RunName, RunView, describe, look, note_cancel, to_json
from paceline.errors import (
    EXIT_FINISHED,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    PacelineError,
    UserError,
)
from paceline.integrations.slurm.client import cancel_job
from paceline.metrics.screen import FOLDED, UNFOLDED, is_live, unfiltered, width_of
from paceline.runs.catalog import find_run
from paceline.runs.machine import ProcessHandle
from paceline.settings.declare import Range

_EVERY_S = 1.0
_EVERY_OF_JOB_S = 5.0  # each status asks the scheduler, which serves others too


@dataclass(frozen=True)
class Status:
    """Show the progress of a run, the time left, its job in a cluster if it has one, and its last failure."""

    run: RunName
    """A run folder, its name in runs/ or the beginning of it, or the id or name of its Slurm job."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Watch:
    """Show the status of a run until the run has ended. Ctrl-C ends the watching, not the run.

    Exit code 0 if it finished, 75 if it was stopped and saved, otherwise that of its last failure.
    """

    run: RunName
    """A run folder, which another machine may write, its name in runs/, or the id or name of its Slurm job."""
    every_s: Annotated[float | None, Range(low=0, high=86_400)] = None
    """Seconds between two looks (5; 1 for a run that has no job)."""


@dataclass(frozen=True)
class Cancel:
    """Ask a run to save and stop.

    This is scancel of its Slurm job, deletion of its Kubernetes job (its pods save within their grace period), or
    SIGTERM to its process on this machine.
    """

    run: RunName
    """A run folder, its name in runs/, or the id or name of its Slurm job."""


def status(settings: Status) -> int:
    view = look(find_run(settings.run))
    print(json.dumps(to_json(view), indent=2) if settings.json else describe(view))
    return EXIT_FINISHED


# --- Watch ------------------------------------------------------------------------------------------------------------


def watch(settings: Watch) -> int:
    folder, every_s = find_run(settings.run), settings.every_s
    shown = ""
    try:
        while True:
            view = look(folder)
            shown = _show(describe(view), shown)
            if view.is_over:
                return _exit_code(view)
            time.sleep(every_s if every_s is not None else _EVERY_S if view.record is None else _EVERY_OF_JOB_S)
    except KeyboardInterrupt:
        print(f"\nno longer watched; {folder.path} continues (paceline cancel {folder.path} stops it)")
        return EXIT_INTERRUPTED


def _show(text: str, before: str) -> str:
    """In place on a terminal; elsewhere one block per change. The age of the last update does not count."""
    if is_live(sys.stdout):
        width = width_of(sys.stdout)
        # In a window that has become narrower, the lines from before are wrapped.
        rows = sum(max(len(line) - 1, 0) // width + 1 for line in before.splitlines())
        lines = [line[: width - 1] for line in text.splitlines()]
        up = f"\x1b[{rows}A" if rows else ""
        drawn = up + UNFOLDED + "".join(f"\x1b[2K{line}\n" for line in lines) + FOLDED + "\x1b[J"
        print(drawn, end="", flush=True, file=unfiltered(sys.stdout))
        return "\n".join(lines)
    if _without_changing_lines(text) != _without_changing_lines(before):
        print(text, flush=True)
    return text


def _without_changing_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith(("  updated:", "  now:"))]


def _exit_code(view: RunView) -> int:
    if view.state == "finished":
        return EXIT_FINISHED
    if view.state == "ended" and view.job is not None:
        return EXIT_FINISHED if {view.job.state, *view.job.tasks} == {"COMPLETED"} else EXIT_INTERNAL
    if view.state in ("preempted", "stopped"):
        return EXIT_PREEMPTED if view.state == "preempted" else EXIT_INTERRUPTED
    code = view.failure.get("exit_code")
    if code is None and view.is_kubernetes and view.job is not None and view.job.exit_code.isdecimal():
        code = int(view.job.exit_code)
    return code if isinstance(code, int) and 0 < code < 256 else EXIT_INTERNAL


# --- Cancel -----------------------------------------------------------------------------------------------------------


def cancel(settings: Cancel) -> int:
    folder = find_run(settings.run)
    view = look(folder)
    if view.record is not None and view.trouble:
        is_slurm = view.record.scheduler == "slurm"
        by_hand = f"scancel {view.record.job_id}, when Slurm answers again"
        raise PacelineError(
            f"job {view.record.job_id} cannot be queried",
            got=view.trouble,
            hint=by_hand if is_slurm else f"kubectl delete {view.record.api} {view.record.job_id}",
        )
    if view.record is not None and view.job is not None and view.job.is_active:
        if view.record.scheduler == "kubernetes":
            from paceline.integrations.kubernetes.client import cluster_of

            cluster_of(view.record).delete(view.record.job_id, view.record.api)
        else:
            cancel_job(view.record.job_id, view.record.cluster)
        note_cancel(view)
        saves = "; it saves before it ends" if view.job.state == "RUNNING" else ""
        print(f"job {view.record.job_id} is cancelled{saves}")
    elif view.owner is not None and not view.is_over:
        _stop_process(view)
    else:
        print(f"{folder.path} is not running ({view.state}); nothing to cancel")
    return EXIT_FINISHED


def _stop_process(view: RunView) -> None:
    owner = view.owner
    assert owner is not None
    if not owner.is_provably_alive:
        raise UserError(
            "this run belongs to another machine",
            where=str(view.folder.path),
            got=str(owner),
            hint=f"ssh {owner.host} kill -TERM {owner.pid}",
        )
    try:
        ProcessHandle(owner.pid, start=owner.process_start).send(signal.SIGTERM)
    except ProcessLookupError:
        print(f"{view.folder.path} is not running any more; nothing to cancel")
        return
    except PermissionError as error:
        raise UserError("this run belongs to another user", where=str(view.folder.path), got=str(owner)) from error
    print(f"SIGTERM to {owner}: it saves and ends; paceline status {view.folder.path} shows it")


COMMANDS = (Command("status", Status, status), Command("watch", Watch, watch), Command("cancel", Cancel, cancel))
