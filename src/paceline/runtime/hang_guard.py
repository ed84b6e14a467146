"""`python -m paceline.runtime.hang_guard RANK PULSE STACKS`: watches one rank that has no supervisor of ours.

It is a separate process: a rank that holds Python's GIL cannot watch itself, and an alarm inside the rank would count
the time in which the job was suspended. The guard reads the pulse (heartbeat) of the rank. After a missed deadline it
makes the rank write its stacks and kills it. It exits with the rank.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from paceline.errors import EXIT_HANG, Cause, PacelineError
from paceline.runs.process_handle import find_process, identity_of_this_process, is_stopped, stat_fields
from paceline.runtime.own_rank import own_rank
from paceline.runtime.pulse import OPEN_FILES, Beat, read_pulse
from paceline.runtime.running_clock import HangClock

STACKS_SIGNAL = signal.SIGURG  # ignored by a process that has not yet registered for it
_LOOK_S = 0.25
_STACKS_S = 3.0
_STACKS_LOOK_S = 0.05


def start_hang_guard(pulse: Path, stacks: Path) -> subprocess.Popen[bytes]:
    """Start a guard for this process, in the same process group, so Ctrl-Z suspends both."""
    module = [sys.executable, "-P", "-m", "paceline.runtime.hang_guard"]
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
        pause(_STACKS_LOOK_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _leave_error_file(beat: Beat, stacks: Path) -> None:
    """For torchrun, whose summary would otherwise only name the signal."""
    from paceline.runtime.error_file import leave_error_file

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
        time.sleep(_LOOK_S)
    with suppress(OSError):
        pulse.unlink()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
