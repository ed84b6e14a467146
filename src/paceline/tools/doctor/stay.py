"""Connects a rank to our launcher: the rank writes heartbeats, and exits when the launcher exits."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from paceline.runtime.detect import RankEnvironment
from paceline.runtime.pulse import ATTEMPT_DIR, Pulse, pulse_path
from paceline.runtime.signals import SUPERVISOR_PID, StopRequest

_ALLOWED_S = 120.0  # the session's own deadline is shorter


class Stay:
    """For the duration of a session. Does nothing under other launchers."""

    def __init__(self, environment: RankEnvironment) -> None:
        self._environment = environment
        self._pulse = Pulse(None)

    def __enter__(self) -> None:
        if not self._environment.is_supervised:
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C and ends the ranks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        at_once = threading.Event()
        at_once.set()  # there is nothing to save
        StopRequest().watch_launcher(os.environ[SUPERVISOR_PID], at_once)
        self._pulse = Pulse(pulse_path(Path(os.environ[ATTEMPT_DIR]), self._environment.rank))
        self._pulse.beat("start", 0, _ALLOWED_S)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._pulse.beat("left", 0, _ALLOWED_S)
