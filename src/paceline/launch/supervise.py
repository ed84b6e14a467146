"""The supervisor: runs attempts until the run is finished, stopped, or cannot continue.

It owns the run folder and passes stop signals on to the ranks. After a failure it writes the report, finds the newest
checkpoint and starts the next attempt. A person reads one screen; a scheduler reads the exit code.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from paceline.checkpoints.format import step_folders, step_of
from paceline.checkpoints.mirror import mirrored
from paceline.errors import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_PREEMPTED, Cause, OwnerLost, UserError
from paceline.launch.attempt import Attempt, AttemptEnd, Attempts, RankMain
from paceline.launch.child import report_error
from paceline.launch.policy import FINAL_CAUSES, Decision, Failure, decide, fewest_microbatches, leave_out_gpu
from paceline.launch.report import FailureReport, report_failure
from paceline.metrics.safe_output import keep_console_in, write_at_once
from paceline.metrics.screen import erase_live_line, fit_to
from paceline.reports.run_page import write_run_page
from paceline.runs.folder import RunFolder
from paceline.runs.machine import Machine
from paceline.runs.members import OWNER_ID, drop_dead_members
from paceline.runs.patience import UnreadableNow
from paceline.runtime.detect import Nodes
from paceline.runtime.resources import count_gpus_without_torch
from paceline.runtime.signals import SIGNAL_WAIT_S
from paceline.settings.schema import GuardConfig
from paceline.settings.small_files import write_plain

# Enough to finish a step and to write a large checkpoint on a busy machine. A second Ctrl-C does not wait.
_INTERRUPT_GRACE_S = 30.0
_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Job:
    """A run to supervise."""

    folder: RunFolder
    guard: GuardConfig
    threads: int
    rank_main: RankMain
    arguments: list[str]  # of `paceline train`
    read_worlds: Callable[[], list[int]]  # the numbers of ranks that are possible now, smallest first
    nodes: Nodes
    accumulate: int
    samples_to_cut: Callable[[int], int]  # into microbatches, on this many local ranks
    lanes: int  # of --exact: the same after a rank was left out; 0 without


class _InterruptibleMachine(Machine):
    """Ctrl-C ends the wait for the ranks of an earlier start."""

    def __init__(self, is_interrupted: Callable[[], bool]) -> None:
        self._is_interrupted = is_interrupted

    def sleep(self, seconds: float) -> None:
        if self._is_interrupted():
            raise KeyboardInterrupt
        super().sleep(seconds)


class Supervisor:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._attempts = Attempts(job.threads)
        self._stop: signal.Signals | None = None  # the first signal that asked for the end
        self._failures: list[Failure] = []
        self._largest_microbatch: int | None = None  # samples; None until a rank runs out of memory
        self._left_out: dict[str, str] = {}  # variables that keep ranks off faulty GPUs
        self._most_ranks = 0  # local ones, after a faulty rank was left out; 0: no limit
        self._pause = threading.Event()
        self._is_first = job.nodes.own == 0
        self._owner_id = ""  # only the first node's supervisor owns the folder
        self._lost: OwnerLost | None = None
        self._last_saved_step = 0
        name = "supervisor.log" if self._is_first else f"supervisor-{job.nodes.own}.log"
        self._console_log = job.folder.logs / name
        self._how_to_stop = f"paceline cancel {job.folder.path}, or kill -TERM {os.getpid()}"
        keep_console_in(self._console_log, self._how_to_stop)
        self._status_before = job.folder.read_status()  # of the run that this one resumes

    def run(self) -> int:
        """Returns the exit code for the shell."""
        worlds = self._job.read_worlds()
        processes = worlds[-1]
        # Of several nodes, the supervisor of the first owns the folder and prints for all.
        with self._listening(), self._owning() if self._is_first else nullcontext():
            for number in itertools.count(1):
                oom_kills = _count_oom_kills()
                self._require_owner()
                end = self._attempt(number, processes)
                self._require_owner()
                if end.is_finished:
                    return EXIT_FINISHED
                if self._is_stopped(end):
                    return self._show_stop(end)
                attempts = self._job.guard.max_restarts + 1
                report = report_failure(
                    end,
                    self._job.folder,
                    attempt=number,
                    attempts=attempts,
                    oom_kills=_count_oom_kills() - oom_kills,
                )
                if self._stop is not None and report.cause is Cause.PEER_LOST:
                    return self._show_stop(end)  # the ranks of another node were stopped before they had begun
                worlds = self._allowed_worlds()
                decision = self._decide(report, worlds, processes)
                self._show_failure(report, decision, number, processes)
                if not decision.restart:
                    return report.exit_code
                self._wait_before_restart(decision.pause_s)
                if decision.halve_microbatch:
                    self._largest_microbatch = self._microbatch(processes) // 2
                if decision.leave_out:
                    self._leave_out(report, decision.processes)
                processes = decision.processes
        raise AssertionError("unreachable")

    def _allowed_worlds(self) -> list[int]:
        """The numbers of ranks that are possible now. A rank that was left out does not come back."""
        worlds = self._job.read_worlds()
        if not self._most_ranks:
            return worlds
        return [size for size in worlds if size <= self._most_ranks] or [self._most_ranks]

    def _leave_out(self, report: FailureReport, ranks_left: int) -> None:
        """The next attempts have fewer ranks. On a machine with GPUs they do not use the faulty one."""
        self._most_ranks = ranks_left
        gpus = count_gpus_without_torch() or 0
        if gpus:
            visible = self._left_out.get(_GPUS, os.environ.get(_GPUS))
            self._left_out = {_GPUS: leave_out_gpu(visible, report.rank, gpus)}

    def _wait_before_restart(self, pause_s: float) -> None:
        deadline_s = time.monotonic() + pause_s
        while (left_s := deadline_s - time.monotonic()) > 0 and not self._pause.wait(min(left_s, SIGNAL_WAIT_S)):
            pass

    @contextmanager
    def _owning(self) -> Iterator[None]:
        """The folder, and its mirror in a store if it has one. After Ctrl-C the store is not waited for."""
        folder = self._job.folder
        machine = _InterruptibleMachine(lambda: self._stop is signal.SIGINT)
        with folder.owned(self._lose, machine) as owner:
            self._owner_id = owner.id
            with mirrored(folder, gives_up=lambda: self._stop is signal.SIGINT):
                yield

    def _lose(self, lost: OwnerLost) -> None:
        """Another host owns the folder now; it shares no locks with this host. Kill the ranks of this node."""
        self._lost = lost
        self._pause.set()
        self._attempts.stop_ranks(signal.SIGKILL)

    def _require_owner(self) -> None:
        if self._lost is not None:
            raise self._lost
        with suppress(OSError):  # the lock file cannot be read now
            self._job.folder.require_owner()

    # --- An attempt

    def _attempt(self, number: int, processes: int) -> AttemptEnd:
        folder = self._job.folder
        arguments = list(self._job.arguments)
        accumulate = self._accumulate(processes)
        if accumulate != self._job.accumulate:
            arguments += ["--accumulate", str(accumulate)]
        stacks_of = partial(folder.stacks_of, number)
        if self._most_ranks:
            arguments += ["--lanes", str(self._job.lanes)]
        environment = {OWNER_ID: self._owner_id, **self._left_out}
        drop_dead_members(folder.path)
        try:
            return self._attempts.run(
                Attempt(number, processes, self._job.rank_main, arguments, stacks_of, self._job.nodes, environment)
            )
        finally:
            folder.drop_empty_stacks()
            drop_dead_members(folder.path)

    def _decide(self, report: FailureReport, worlds: list[int], processes: int) -> Decision:
        if self._stop is not None:
            return Decision(False, f"{self._stop.name} had asked for the end")
        self._failures.append(
            Failure(
                cause=report.cause,
                rank=report.rank,
                step=report.step,
                saved_step=self._saved_step(),
                processes=processes,
                is_named=report.is_named,
            )
        )
        return decide(
            self._failures,
            max_restarts=self._job.guard.max_restarts,
            worlds=worlds,
            auto_microbatch=self._job.guard.auto_microbatch,
            can_halve=self._microbatch(processes) > 1,
            nodes=self._job.nodes.count,
        )

    def _accumulate(self, processes: int) -> int:
        """Microbatches of a rank or lane: the setting of the user, or as few as fit into memory."""
        if self._largest_microbatch is None:
            return self._job.accumulate
        return fewest_microbatches(self._job.samples_to_cut(processes), self._largest_microbatch)

    def _microbatch(self, processes: int) -> int:
        """Samples."""
        return self._job.samples_to_cut(processes) // self._accumulate(processes)

    def _saved_step(self) -> int:
        """Of the newest checkpoint; the ranks verify it before they use it."""
        with suppress(UnreadableNow):  # the newest that was seen before, then
            steps = [step_of(path) for path in step_folders(self._job.folder.checkpoints)]
            self._last_saved_step = max(steps, default=0)
        return self._last_saved_step

    # --- What a person reads

    def _show_failure(self, report: FailureReport, decision: Decision, number: int, processes: int) -> None:
        saved = self._saved_step()
        report.lost_steps = max(0, report.step - saved)
        report.is_restarted = decision.restart
        folder = self._job.folder
        if decision.restart:
            start = f"from step {saved}" if saved else "from the beginning"
            ranks = "1 rank" if decision.processes == 1 else f"{decision.processes} ranks"
            again = "1 step is" if report.lost_steps == 1 else f"{report.lost_steps} steps are"
            report.done = f"started again {start} on {ranks} (attempt {number + 1}); {again} computed again"
            if decision.leave_out:
                report.done += f"; rank {report.rank} is left out, the bits of the result stay the same"
            if decision.halve_microbatch:
                samples, before = self._job.samples_to_cut(processes), self._accumulate(processes)
                now = fewest_microbatches(samples, self._microbatch(processes) // 2)
                report.done += f"; {now} microbatches instead of {before} on every rank"
        else:
            report.done = f"not started again: {decision.reason}"
            can_go_on = saved and folder.resume_command and report.cause is not Cause.CHECKPOINT
            report.done += f"; {folder.resume_command} resumes from step {saved}" if can_go_on else ""
            if self._is_first and not folder.keeps_final_status(self._status_before):
                folder.write_status("failed", reason=report.what, step=report.step, attempt=number)
        if self._job.nodes.count > 1 and report.cause is Cause.PEER_LOST:
            print(f"node {report.host}: attempt {number} ended, because another node's did", file=sys.stderr)
            return  # that node prints the report
        erase_live_line()
        if folder.path.is_dir():
            report.write(folder)
        if not decision.restart:
            self._write_page()
        if report.cause in FINAL_CAUSES and number == 1:
            if not report_error(report.error):
                print(fit_to(sys.stderr, report.screen), file=sys.stderr)  # it explains itself, and nothing was tried
        else:
            has_no_file = folder.is_temporary and report.cause is Cause.INTERNAL
            print(fit_to(sys.stderr, report.text(with_traceback=has_no_file)), file=sys.stderr)
        sys.stderr.flush()

    def _is_stopped(self, end: AttemptEnd) -> bool:
        has_begun = any(state.beat is not None or state.exit is not None for state in end.ranks.values())
        if self._stop is not None and (end.is_cut_short or not has_begun):
            return True
        stopped = [state.exit is not None and state.exit.cause is Cause.PREEMPTED for state in end.ranks.values()]
        return (bool(stopped) and all(stopped)) or self._stop is signal.SIGINT

    def _show_stop(self, end: AttemptEnd) -> int:
        folder = self._job.folder
        status = folder.read_status()
        saved, step = status.get("status") == "preempted", self._saved_step()
        asked = self._stop.name if self._stop is not None else ""
        is_written = status != self._status_before  # else the ranks had not begun to write
        reason = status.get("reason", asked) if is_written else asked
        if self._stop is signal.SIGINT:
            reason = "interrupted by the user"
        if saved and is_written:
            what = f"stopped at step {status.get('step')} and saved ({reason})"
        else:
            newest = f"the newest checkpoint is of step {step}" if step else "nothing was saved"
            what = f"stopped ({reason}); {newest}"
        if not self._is_first:
            return EXIT_PREEMPTED
        kept = {name: status[name] for name in ("step", "save_s", "console") if name in status}
        if not (saved and is_written):
            kept["step"] = step  # the step to resume from
        if not folder.keeps_final_status(self._status_before):
            state = "stopped" if self._stop is signal.SIGINT else "preempted"
            folder.write_status(state, **kept, reason=reason)
        self._write_page()
        erase_live_line()
        then = f"; continue with: {folder.resume_command}" if step and folder.resume_command else ""
        print(fit_to(sys.stderr, f"\n{what}{then}"), file=sys.stderr)
        return EXIT_INTERRUPTED if self._stop is signal.SIGINT else EXIT_PREEMPTED

    def _write_page(self) -> None:
        """Write report.html, if the run has metrics."""
        folder = self._job.folder
        if self._is_first and folder.metrics_jsonl.exists():
            with suppress(Exception):  # the disk may have failed; the screen already says so
                write_run_page(folder.path)

    # --- Signals

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Pass stop signals on to the ranks, as a signal that all of them handle."""
        stops = {signal.Signals[name] for name in (*self._job.guard.stop_signals, "SIGTERM")}
        before = {number: signal.signal(number, self._pass_on) for number in stops}
        if signal.SIGHUP not in stops:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._note_hangup)
        before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_hangup(self, number: int, frame: FrameType | None) -> None:
        """The terminal is closed, as after a lost ssh connection. The run continues."""
        text = f"note: SIGHUP: the terminal was closed. The run continues. To stop it: {self._how_to_stop}.\n"
        with suppress(OSError, UserError):
            write_plain(self._console_log, text.encode(errors="backslashreplace"), appends=True)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stop = self._stop or signal.Signals(number)
        self._pause.set()
        name = signal.Signals(number).name
        self._attempts.stop_ranks(number if name in self._job.guard.stop_signals else signal.SIGTERM)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C: save if it takes less than a second. A second Ctrl-C does not wait."""
        is_second = self._stop is signal.SIGINT
        self._stop = signal.SIGINT
        self._pause.set()
        if is_second:
            self._attempts.stop_ranks(signal.SIGKILL)
            return
        erase_live_line()
        write_at_once(sys.stderr, b"\nstopping and saving; Ctrl-C again stops at once\n")
        self._attempts.stop_ranks(signal.SIGTERM)
        timer = threading.Timer(_INTERRUPT_GRACE_S, self._attempts.stop_ranks, (signal.SIGKILL,))
        timer.daemon = True
        timer.start()


def _count_oom_kills() -> int:
    """Processes of this container that the kernel has killed for memory so far."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        lines = (Path("/sys/fs/cgroup") / group / "memory.events").read_text().split("\n")
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
