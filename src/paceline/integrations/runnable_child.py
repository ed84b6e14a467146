"""A `paceline` command as the child of a pipeline's step: it speaks through the step, and stops with it."""

from __future__ import annotations

import codecs
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from types import FrameType

from paceline.integrations.runnable_output import show
from paceline.metrics.screen import OUTPUT, pass_on

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.1
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


def run_paceline(arguments: list[str], log: Path) -> int:
    """Run it to its end and return its exit code. What it prints is added to the log, and printed here as it comes.

    By way of a file, not of a pipe: should this process be killed, a pipe would break and take the training along.
    Instead the kernel then asks it to save and leave. It has a session of its own, so that Ctrl-C reaches it once:
    through us.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def follow_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    with log.open("ab") as sink, log.open("rb") as source:
        source.seek(0, os.SEEK_END)
        with (
            subprocess.Popen(
                [sys.executable, "-m", "paceline", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", OUTPUT: ""},  # the log is complete, whatever is shown
                start_new_session=True,
                preexec_fn=follow_parent,  # noqa: PLW1509 - one call into libc, loaded before the fork
            ) as child,
            _passing_on_signals(child),
        ):
            _print_until_end(child, source)
    return child.returncode


def _print_until_end(child: subprocess.Popen[bytes], source: BufferedReader) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    is_over = False
    while not is_over:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_LOOK_S)
        is_over = child.returncode is not None  # before the last look, which then misses nothing
        text = decoder.decode(source.read(), final=is_over)
        pass_on(text, sys.stdout)
        show(text)


@contextmanager
def _passing_on_signals(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Only the main thread may; in another one whoever started it has to."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def send_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, send_on) for number in (getattr(signal, name) for name in _PASSED_ON)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
