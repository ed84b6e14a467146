"""Run a `paceline` command as a child process of a pipeline step. The step prints its output and forwards signals."""

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

_POLL_S = 0.1
_FORWARDED = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


def run_paceline(arguments: list[str], log: Path) -> int:
    """Run the command and return its exit code. Its output is appended to the log and printed here as it arrives.

    The child prints into a file, not into a pipe. If this process is killed, a pipe would break while the run saves.
    """
    with log.open("ab") as sink, log.open("rb") as source:
        source.seek(0, os.SEEK_END)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", OUTPUT: ""}  # always write the complete log
        with (
            start_child(arguments, stdout=sink, stderr=subprocess.STDOUT, environment=environment) as child,
            _forward_signals(child),
        ):
            return _print_until_end(child, source)


def _print_until_end(child: Child, source: BufferedReader) -> int:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    code = None
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(_POLL_S)
        text = decoder.decode(source.read(), final=code is not None)
        pass_on(text, sys.stdout)
        show(text)
    return code


@contextmanager
def _forward_signals(child: Child) -> Iterator[None]:
    """Only the main thread can install signal handlers. In another thread, the caller must forward signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (getattr(signal, name) for name in _FORWARDED)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
