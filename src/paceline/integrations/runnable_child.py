"""A `paceline` command as the child of a pipeline's step: it speaks through the step, and stops with it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_PR_SET_PDEATHSIG = 1
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


def run_paceline(arguments: list[str]) -> int:
    """Run it to its end and return its exit code.

    It has a session of its own, so that a Ctrl-C reaches it once: through us. Should this process be killed,
    the kernel asks it to save and leave.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def follow_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    with (
        subprocess.Popen(
            [sys.executable, "-m", "paceline", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=follow_parent,  # noqa: PLW1509 - one call into libc, loaded before the fork
        ) as child,
        _passing_on_signals(child),
    ):
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
    return child.returncode


@contextmanager
def _passing_on_signals(child: subprocess.Popen[str]) -> Iterator[None]:
    """Only the main thread may; in another one whoever started it has to."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (getattr(signal, name) for name in _PASSED_ON)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
