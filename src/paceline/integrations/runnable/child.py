"""Run a `paceline` command as a child process of a pipeline step. The step prints its output and forwards signals."""

from __future__ import annotations

import codecs
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from types import FrameType
from typing import TextIO

from paceline.launch.child import Child, start_child
from paceline.metrics.console import is_step_line
from paceline.metrics.screen import BRIEF, OUTPUT, output_mode, pass_on

_screen: TextIO | None = None  # the original standard output
_begun = ""  # an incomplete line
_POLL_S = 0.1
_FORWARDED = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")


# The console output of a pipeline. Runnable itself prints about four hundred lines per run.
#
# PACELINE_OUTPUT=brief: only the lines of the pipeline's steps, none per training step. quiet: only the result or the
# error. Hidden output goes to the run folder's `pipeline.log`.


def print_line(text: str, end: str = "\n") -> None:
    """Print a line of a step, also to the original standard output."""
    print(text, end=end, flush=True)
    show(text + end)


def show(text: str) -> None:
    """In brief mode, print to the original standard output."""
    global _begun
    if _screen is None or output_mode() != BRIEF:
        return
    *lines, _begun = (_begun + text).split("\n")
    pass_on("".join(f"{line}\n" for line in lines if line and not is_step_line(line)), _screen)


@contextmanager
def hide_other_output(find_folder: Callable[[], Path]) -> Iterator[None]:
    """In brief and quiet mode, redirect the output of this process and its children to a file."""
    global _screen
    if output_mode() not in (BRIEF, "quiet"):
        yield
        return
    kept = {number: os.dup(number) for number in (1, 2)}
    with tempfile.TemporaryFile() as hidden, os.fdopen(kept[1], "w", encoding="utf-8") as _screen:
        try:
            _redirect({1: hidden.fileno(), 2: hidden.fileno()})
            yield
        finally:
            _redirect(kept)
            os.close(kept[2])
            _save(hidden.fileno(), find_folder())
            _screen = None


def _redirect(files: dict[int, int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for number, file in files.items():
        os.dup2(file, number)


def _save(hidden: int, folder: Path) -> None:
    """Append to pipeline.log in the run folder. Runnable may have chosen the run's name only now."""
    if not folder.is_dir():  # the pipeline was only compiled, or ended before its first step
        return
    os.lseek(hidden, 0, os.SEEK_SET)
    with os.fdopen(os.dup(hidden), "rb") as source, (folder / "pipeline.log").open("ab") as log:
        shutil.copyfileobj(source, log)


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
