"""Stop requests: signals to a rank, and the death of its launcher.

A handler only records the request. At the next step the ranks agree that one of them has a request, save together and
exit. A signal interrupts nothing halfway, and a second one has no effect.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType

from paceline.errors import EXIT_PREEMPTED
from paceline.runs.machine import find_process
from paceline.runtime.pulse import RunningClock

SUPERVISOR_PID = "PACELINE_SUPERVISOR_PID"  # the identity of the supervisor, for the ranks it starts
# The longest single wait of the main thread. After a suspension, the kernel may deliver a signal to another thread.
# The main thread's wait is then not interrupted, and the handler, which Python runs only there, would not run.
SIGNAL_WAIT_S = 0.25
_ORPHAN_GRACE_S = 25.0
_POLL_S = 0.25


class StopRequest:
    """Whether this rank has a stop request, its reason, and its time."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._asked_at = 0.0

    def ask(self, reason: str) -> None:
        if self.reason is None:
            self._asked_at = time.monotonic()
            self.reason = reason

    def is_due(self, notice_s: float, needed_s: float) -> bool:
        """Whether to stop now: immediately, or when the remaining notice is just enough to save."""
        if self.reason is None:
            return False
        return time.monotonic() - self._asked_at >= notice_s - needed_s

    def listen(self, names: Iterable[str]) -> None:
        """Handle these signals from now on. Must run in the main thread."""

        def take_note(number: int, frame: FrameType | None) -> None:
            self.ask(signal.Signals(number).name)

        for name in names:
            signal.signal(getattr(signal, name), take_note)

    def watch_launcher(self, identity: str, after_that: threading.Event, name: str = "the supervisor") -> None:
        """Request a stop when the launcher dies. If the ranks do not stop in time, end the process."""

        def save_and_exit() -> None:
            self.ask(f"{name} died")
            clock = RunningClock()
            while clock.seconds < _ORPHAN_GRACE_S and not after_that.wait(_POLL_S):
                pass  # short waits: a suspended rank gets the rest of its time when it continues
            os._exit(EXIT_PREEMPTED)

        when_process_ends(identity, save_and_exit)


def exit_with_process(identity: str) -> None:
    """Exit immediately when this process has ended. For ranks that have nothing to save."""
    when_process_ends(identity, lambda: os._exit(EXIT_PREEMPTED))


def when_process_ends(identity: str, then: Callable[[], None]) -> None:
    """Call `then` in a thread when the process with this identity has ended, in any way."""

    def watch() -> None:
        process = find_process(identity)
        if process is not None:
            process.wait()
        then()

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
