"""A `paceline` command as the child of a pipeline's step: it speaks through the step, and stops with it."""

from __future__ import annotations

import codecs
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

from paceline.integrations.runnable.output import show
from paceline.launch.child import Child, start_child
from paceline.metrics.screen import OUTPUT, pass_on

_LOOK_S = 0.1
_PASSED_ON = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


def run_paceline(arguments: list[str], log: Path) -> int:
    """Run it to its end and return its exit code. What it prints is added to the log, and printed here as it comes.

    It prints into a file and not into a pipe: if this process is killed, a pipe would break while the run still saves.
    """
    with log.open("ab") as sink, log.open("rb") as source:
        source.seek(0, os.SEEK_END)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", OUTPUT: ""}  # the log is complete, whatever is shown
        with (
            start_child(arguments, stdout=sink, stderr=subprocess.STDOUT, environment=environment) as child,
            _passing_on_signals(child),
        ):
            return _print_until_end(child, source)


def _print_until_end(child: Child, source: BufferedReader) -> int:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    code = None
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(_LOOK_S)
        text = decoder.decode(source.read(), final=code is not None)
        pass_on(text, sys.stdout)
        show(text)
    return code


@contextmanager
def _passing_on_signals(child: Child) -> Iterator[None]:
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
