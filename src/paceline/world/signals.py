"""Signals that ask a rank to stop, and the death of its launcher, which asks the same.

A handler only takes note. The ranks agree at the next step that one of them was asked, save together and
leave; nothing is torn by a signal, and a second one changes nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType

from paceline.runs.process_handle import find_process

SUPERVISOR_PID = "PACELINE_SUPERVISOR_PID"  # the identity of the supervisor, for the ranks it starts
_ORPHAN_GRACE_S = 25.0


class StopRequest:
    """Whether this rank was asked to stop, by whom, and when."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._asked_at = 0.0

    def ask(self, reason: str) -> None:
        if self.reason is None:
            self._asked_at = time.monotonic()
            self.reason = reason

    def is_due(self, notice_s: float, needed_s: float) -> bool:
        """Whether the time has come: at once, or when what is left of the notice is just enough to save."""
        if self.reason is None:
            return False
        return time.monotonic() - self._asked_at >= notice_s - needed_s

    def listen(self, names: Iterable[str]) -> None:
        """Take note of these signals from now on. Must run in the main thread."""

        def take_note(number: int, frame: FrameType | None) -> None:
            self.ask(signal.Signals(number).name)

        for name in names:
            signal.signal(getattr(signal, name), take_note)

    def watch_supervisor(self, identity: str, after_that: threading.Event) -> None:
        """Ask to stop when the supervisor dies; should the ranks not get there, end the process."""

        def watch() -> None:
            supervisor = find_process(identity)
            if supervisor is not None:
                supervisor.wait()
            self.ask("the supervisor died")
            after_that.wait(_ORPHAN_GRACE_S)
            os._exit(75)

        threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()
