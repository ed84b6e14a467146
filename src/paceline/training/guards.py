"""What looks after a rank while it trains: watchdog, stop request, clock, profiler, and the faults it rehearses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from paceline.metrics.phases import PhaseClock
from paceline.metrics.profile import StepProfiler
from paceline.runs.folder import RunFolder
from paceline.runs.members import Member
from paceline.runs.process_handle import identity_of
from paceline.runtime.detect import RankEnvironment, World
from paceline.runtime.job_identity import find_torchrun_agent
from paceline.runtime.pulse import ATTEMPT_DIR, Pulse, private_pulse_path, pulse_path
from paceline.runtime.signals import SUPERVISOR_PID, StopRequest
from paceline.runtime.watchdog import Watchdog
from paceline.settings.faults import parse_faults
from paceline.settings.schema import Config
from paceline.training.inject import Faults


@dataclass
class Guards:
    """Of this rank."""

    watchdog: Watchdog = field(default_factory=lambda: Watchdog(Pulse(None)))
    stop: StopRequest = field(default_factory=StopRequest)
    phases: PhaseClock = field(default_factory=PhaseClock)
    faults: Faults | None = None
    profiler: StepProfiler | None = None
    member: Member | None = None  # who owns the run folder; None: nobody asks
    begin: Callable[[], None] = lambda: None  # the run folder says from now on that this run is under way
    is_over: threading.Event = field(default_factory=threading.Event)

    def enter(self, phase: str, step: int) -> None:
        """The rank begins a phase of this step (the first step is 1)."""
        if self.profiler is not None:
            self.profiler.enter(phase, step, self.phases)
        self.watchdog.enter(phase, step)
        self.phases.enter(phase)

    def open_folder(self, config: Config, world: World, folder: RunFolder, attempt: int) -> None:
        """The run folder is known: stacks and the ledger of faults go there."""
        self.watchdog.open_stacks(folder.stacks_of(attempt, world.rank))
        self.phases = PhaseClock(world.device)
        if config.run.profile:
            self.profiler = StepProfiler(world, folder, partial(self.watchdog.enter, "save"))
        faults = parse_faults(config.guard.inject)
        if faults:
            self.faults = Faults(faults, world.rank, attempt, folder.faults, folder.checkpoints)
            self.watchdog.on_phase = self.faults.at_phase

    def close(self) -> None:
        self.watchdog.close()
        self.is_over.set()


def open_guards(config: Config, environment: RankEnvironment) -> Guards:
    """Before anything else: from here on the rank survives signals and has a pulse, in this order.

    A rank without a pulse is deaf still, and who wants it to end does not ask.
    """
    stop = StopRequest()
    names = {*config.guard.stop_signals, "SIGTERM"}
    if not environment.is_supervised and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # torchrun ends on SIGHUP. It passes the signal on and kills its ranks 30 s later: time enough to save.
        names.add("SIGHUP")
    stop.listen(names)
    attempt_dir = os.environ.get(ATTEMPT_DIR) if environment.is_supervised else None
    pulse = Pulse(pulse_path(Path(attempt_dir), environment.rank) if attempt_dir else private_pulse_path())
    watchdog = Watchdog(pulse, timeout_s=config.guard.hang_timeout_s, is_supervised=environment.is_supervised)
    guards = Guards(watchdog, stop)
    if environment.is_supervised:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of us; the supervisor decides
        guards.stop.watch_launcher(os.environ[SUPERVISOR_PID], guards.is_over)
    elif environment.launcher == "torchrun":
        # Each rank has a session of its own: what ends a killed agent, and Ctrl-C, does not reach it.
        guards.stop.watch_launcher(identity_of(find_torchrun_agent()), guards.is_over, "torchrun")
    return guards
