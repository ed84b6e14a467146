"""What watches a rank while it trains: watchdog, stop request, phase clock, profiler, injected faults, slow ranks."""

from __future__ import annotations

import logging
import os
import signal
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from paceline.metrics.phases import PhaseClock
from paceline.metrics.profile import StepProfiler
from paceline.metrics.start_clock import StartClock
from paceline.runs.folder import RunFolder
from paceline.runs.machine import age_s, identity_of, identity_of_this_process
from paceline.runs.members import Member
from paceline.runtime.detect import RankEnvironment, World, find_torchrun_agent
from paceline.runtime.pulse import ATTEMPT_DIR, Pulse, private_pulse_path, pulse_path
from paceline.runtime.signals import SUPERVISOR_PID, StopRequest
from paceline.runtime.watchdog import Watchdog
from paceline.settings.faults import parse_faults
from paceline.settings.schema import Config
from paceline.training.inject import Faults

_log = logging.getLogger("paceline")
_SLOW_FACTOR = 3.0
_SLOW_INTERVALS = 2  # in a row: one slow interval may be a short disturbance
_LEAST_DIFFERENCE_S = 0.05  # per interval; smaller differences are noise


def _do_nothing() -> None:
    """For a run whose start is not recorded, as in tests."""


@dataclass(frozen=True)
class Guards:
    """The guards of one rank. Those of a run are complete: see `for_run`."""

    watchdog: Watchdog = field(default_factory=lambda: Watchdog(Pulse(None)))
    stop: StopRequest = field(default_factory=StopRequest)
    phases: PhaseClock = field(default_factory=PhaseClock)
    faults: Faults | None = None
    profiler: StepProfiler | None = None
    member: Member | None = None  # of the ownership of the run folder; None: ownership is not checked
    record_start: Callable[[], None] = _do_nothing  # writes config and environment of the run into its folder
    observers: list[Callable[[str, int], None]] = field(default_factory=list)  # called with each phase and its step
    start: StartClock = field(default_factory=StartClock)
    is_over: threading.Event = field(default_factory=threading.Event)

    def enter(self, phase: str, step: int) -> None:
        """The rank begins a phase of this step (the first step is 1)."""
        if self.profiler is not None:
            self.profiler.enter(phase, step, self.phases)
        self.watchdog.enter(phase, step)
        if self.faults is not None:
            self.faults.at_phase(phase, step)
        for observe in self.observers:
            observe(phase, step)
        self.phases.enter(phase)

    def for_run(
        self,
        config: Config,
        world: World,
        folder: RunFolder,
        *,
        attempt: int,
        record_start: Callable[[], None] = _do_nothing,
    ) -> Guards:
        """The guards of a run whose folder is known. They write stacks, traces and injected faults there."""
        self.watchdog.open_stacks(folder.stacks_of(attempt, world.rank))
        faults = parse_faults(config.guard.inject)
        return replace(
            self,
            phases=PhaseClock(world.device),
            profiler=StepProfiler(world, folder, partial(self.watchdog.enter, "save")) if config.run.profile else None,
            faults=Faults(faults, world.rank, attempt, folder.faults, folder.checkpoints) if faults else None,
            member=folder.member,
            record_start=record_start,
        )

    def close(self) -> None:
        self.watchdog.close()
        self.is_over.set()


def open_guards(config: Config, environment: RankEnvironment) -> Guards:
    """Handle stop signals, then start the pulse. Call it before anything else in a rank.

    The order matters. A supervisor kills a rank that has no pulse yet, because it cannot handle a stop signal.
    """
    stop = StopRequest()
    names = {*config.guard.stop_signals, "SIGTERM"}
    if not environment.is_supervised and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # torchrun ends on SIGHUP. It forwards the signal and kills its ranks 30 s later, which is enough to save.
        names.add("SIGHUP")
    stop.listen(names)
    attempt_dir = os.environ.get(ATTEMPT_DIR) if environment.is_supervised else None
    pulse = Pulse(pulse_path(Path(attempt_dir), environment.rank) if attempt_dir else private_pulse_path())
    watchdog = Watchdog(pulse, timeout_s=config.guard.hang_timeout_s, is_supervised=environment.is_supervised)
    guards = Guards(watchdog, stop, start=StartClock(_age_of_command_s(environment)))
    guards.start.enter("group")
    if environment.is_supervised:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all ranks; the supervisor decides
        guards.stop.watch_launcher(os.environ[SUPERVISOR_PID], guards.is_over)
    elif environment.launcher == "torchrun":
        # torchrun gives each rank its own session. The kill of its agent and Ctrl-C do not reach the ranks.
        guards.stop.watch_launcher(identity_of(find_torchrun_agent()), guards.is_over, "torchrun")
    return guards


def _age_of_command_s(environment: RankEnvironment) -> float:
    """Since the supervisor was started, for its first attempt; else since this process was."""
    is_first = environment.is_supervised and environment.attempt == 1
    return age_s(os.environ[SUPERVISOR_PID] if is_first else identity_of_this_process()) or 0.0


class Stragglers:
    """Names a rank that is much slower than the others.

    Compares the time that ranks spend on their own work. The time of a whole step is the same on all ranks, because
    they wait for each other.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._slow_intervals = [0] * world.world_size
        self.named: list[int] = []

    def compare(self, busy_s: Tensor, step: int) -> None:
        """`busy_s` has a row per lane, in the order of ranks. It is the same on every rank."""
        if self._world.world_size == 1:
            return
        times = busy_s.view(self._world.world_size, -1).sum(1).tolist()
        for rank, mine in enumerate(times):
            usual = statistics.median(times[:rank] + times[rank + 1 :])
            is_slow = mine > _SLOW_FACTOR * usual and mine - usual > _LEAST_DIFFERENCE_S
            self._slow_intervals[rank] = self._slow_intervals[rank] + 1 if is_slow else 0
            if self._slow_intervals[rank] == _SLOW_INTERVALS:
                self.named.append(rank)
                if self._world.is_primary:
                    _log.warning(
                        "warning: rank %d is slow: %.1f times the others' work time since some steps (step %d)",
                        *(rank, mine / max(usual, 1e-9), step),
                    )
