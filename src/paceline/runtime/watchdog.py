"""Deadlines for the phases of a rank, computed from earlier durations.

The rank writes each phase and its deadline to its pulse. Under our own supervisor it does nothing else: the supervisor
sees a missed deadline and signals every rank to write its stacks. A C-level handler writes them even if Python is
blocked.

Under another launcher each rank starts a guard (`python -m paceline.runtime.watchdog RANK PULSE STACKS`). It is a
separate process: a rank that holds Python's GIL cannot watch itself, and an alarm inside the rank would count the time
in which the job was suspended. After a missed deadline the guard makes the rank write its stacks and kills it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from paceline.errors import EXIT_HANG, Cause, PacelineError
from paceline.runs.machine import find_process, identity_of_this_process, is_stopped, stat_fields
from paceline.runtime.pulse import OPEN_FILES, Beat, HangClock, Pulse, read_pulse
from paceline.runtime.this_rank import own_rank
from paceline.settings.small_files import make_plain_folder, open_plain

STACKS_SIGNAL = signal.SIGURG  # ignored by a process that has not yet registered for it
_POLL_S = 0.25
_STACKS_S = 3.0
_STACKS_POLL_S = 0.05
_START_S = 600.0  # data, compilation, the first collectives
_LEAST_STEP_S, _LEAST_OTHER_S = 30.0, 300.0
_FACTOR = 20
_STEP_PHASES = ("data", "forward", "backward", "reduce", "update")


def start_hang_guard(pulse: Path, stacks: Path) -> subprocess.Popen[bytes]:
    """Start a guard for this process, in the same process group, so Ctrl-Z suspends both."""
    module = [sys.executable, "-P", "-m", "paceline.runtime.watchdog"]
    quiet = subprocess.DEVNULL
    command = [*module, identity_of_this_process(), str(pulse), str(stacks.absolute())]
    open_files = [int(pulse.name)] if pulse.parent == OPEN_FILES else []
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, pass_fds=open_files)


def wait_for_stacks(paths: Iterable[Path], pause: Callable[[float], object] = time.sleep) -> None:
    """Wait until every file has content and stops growing, or for a few seconds."""
    files = list(paths)
    deadline = time.monotonic() + _STACKS_S
    sizes: list[int] = []
    while time.monotonic() < deadline:
        before, sizes = sizes, [_size(path) for path in files]
        if all(sizes) and sizes == before:
            return
        pause(_STACKS_POLL_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _leave_error_file(beat: Beat, stacks: Path) -> None:
    """For torchrun, whose summary would otherwise only name the signal."""
    from paceline.runtime.this_rank import leave_error_file

    what = f"rank {own_rank()} made no progress for {time.monotonic() - beat.since_s:.0f} s"
    error = PacelineError(
        what,
        where=f"{beat.phase} of step {beat.step}",
        hint=f"every rank's stack is in {stacks.parent} (this one: {stacks.name}); --hang-timeout-s sets the deadline",
        cause=Cause.HANG,
    )
    # In "reduce" this rank waits for another one.
    leave_error_file(error.screen(), EXIT_HANG, is_consequence=beat.phase == "reduce")


def _is_peer_stopped(rank: int) -> bool:
    """Whether another rank of this node (same command, same launcher) is stopped by a signal."""
    try:
        parent = stat_fields(rank)[1]
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        command = _command_of(rank)
    except (OSError, IndexError):  # it has ended, or there is no /proc
        return False
    return any(is_stopped(int(pid)) and _command_of(int(pid)) == command for pid in children)


def _command_of(pid: int) -> bytes | None:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None


def main(identity: str, pulse: Path, stacks: Path) -> None:
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):  # a scheduler sends them to every process
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    rank, clock = find_process(identity), HangClock()
    while rank is not None and rank.is_running:
        clock.look()
        beat = read_pulse(pulse)
        beats = {0: beat} if beat is not None else {}
        if clock.find_late(beats, is_any_stopped=rank.is_stopped or _is_peer_stopped(rank.pid)):
            rank.send(STACKS_SIGNAL)
            wait_for_stacks([stacks])
            _leave_error_file(beats[0], stacks)
            rank.send(signal.SIGKILL)
        time.sleep(_POLL_S)
    with suppress(OSError):
        pulse.unlink()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))


class Watchdog:
    """Records this rank's phases and computes how long each may take."""

    def __init__(self, pulse: Pulse, *, timeout_s: float = 0.0, is_supervised: bool = False) -> None:
        self.pulse = pulse
        self._timeout_s = timeout_s
        self._is_supervised = is_supervised
        self._allowed_s = _START_S
        self._step_times: deque[float] = deque(maxlen=50)
        self._step_limit_s = _START_S
        self._longest: dict[str, float] = {}
        self._last_step_at = 0.0
        self._is_step_whole = True  # False if the step was suspended
        self._since = time.monotonic()
        self._stacks: TextIO | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self.pulse.beat("start", 0, _START_S)

    def open_stacks(self, path: Path) -> None:
        """Allow others to request this rank's stacks from now on."""
        make_plain_folder(path.parent)
        self._stacks = open(open_plain(path, os.O_WRONLY | os.O_TRUNC), "w")  # noqa: PTH123, SIM115 - a descriptor
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        if not self._is_supervised and self.pulse.path is not None:
            self._guard = start_hang_guard(self.pulse.path, path)

    def enter(self, phase: str, step: int) -> None:
        """The rank begins a phase of this step."""
        now = time.monotonic()
        self._learn(phase, now)
        self._allowed_s = self._allowed(phase)
        self.pulse.beat(phase, step, self._allowed_s)

    @property
    def longest_step_s(self) -> float:
        """Of the last steps; 0 before the first."""
        return max(self._step_times, default=0.0)

    def close(self) -> None:
        """Call when the rank's work is done. It then only waits for the others."""
        self.pulse.beat("left", self.pulse.step, _START_S)
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None
            if self.pulse.path is not None:
                with suppress(OSError):  # a file without a name
                    self.pulse.path.unlink()

    def _learn(self, phase: str, now: float) -> None:
        """Update the durations. A phase that took longer than allowed was suspended, and is not counted."""
        last = self.pulse.phase
        is_suspended = now - self._since > self._allowed_s
        self._is_step_whole &= not is_suspended
        if last not in _STEP_PHASES:
            if not is_suspended:
                self._longest[last] = max(self._longest.get(last, 0.0), now - self._since)
        elif last == "update" and self._is_step_whole:  # a complete step is done
            self._step_times.append(now - self._last_step_at)
            self._step_limit_s = self._timeout_s or max(_LEAST_STEP_S, _FACTOR * max(self._step_times))
        if phase == "data":
            self._last_step_at = now
            self._is_step_whole = True
        self._since = now

    def _allowed(self, phase: str) -> float:
        if not self._step_times:
            return _START_S
        if phase in _STEP_PHASES:
            return self._step_limit_s
        return self._timeout_s or max(_LEAST_OTHER_S, _FACTOR * self._longest.get(phase, 0.0))
