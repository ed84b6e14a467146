"""Runs `paceline train` in a child process from Python, and prints its output.

A supervisor has signal handlers and a fork server, and decides the exit code. None of that belongs in the process of
a notebook.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from paceline.errors import EXIT_FINISHED, EXIT_INTERRUPTED, PacelineError, error_kind
from paceline.launch.child import Child, start_child
from paceline.metrics.screen import OUTPUT, pass_on
from paceline.runs.folder import RunFolder
from paceline.runs.trust import trust_variables
from paceline.runtime.signals import HEAR_SIGNALS_S

_LAST_OUTPUT_S = 2.0


def train_in_child(arguments: list[str], folder: Path, *, quiet: bool) -> None:
    """Train to the end. Raises the error with which the command ended."""
    (output, output_end), (errors, errors_end) = os.pipe(), os.pipe()
    words = ["train", *arguments, *(["--quiet"] if quiet else [])]
    with start_child(
        words,
        stdout=output_end,
        stderr=errors_end,
        kept_open=(output, errors),
        shows_error=True,
        environment=_environment(),
    ) as child:
        os.close(output_end)
        os.close(errors_end)
        screens = ((output, None if quiet else sys.stdout), (errors, sys.stderr))
        readers = [threading.Thread(target=_print_on, args=pair, daemon=True) for pair in screens]
        for reader in readers:
            reader.start()
        code, is_interrupted = _wait(child)
        for reader in readers:
            reader.join(_LAST_OUTPUT_S)  # with a limit: a process that a rank has left behind may hold the pipe
        error = child.error()
    if is_interrupted or code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code != EXIT_FINISHED:
        raise error or _unexplained(code, folder)


def _wait(child: Child) -> tuple[int, bool]:
    """The exit code, and whether Ctrl-C was pressed here. The command then saves and ends by itself."""
    is_interrupted = False
    while True:
        try:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(HEAR_SIGNALS_S), is_interrupted
        except KeyboardInterrupt:
            is_interrupted = True
            child.send_signal(signal.SIGINT)


def _print_on(descriptor: int, screen: TextIO | None) -> None:
    """Until the pipe is closed; without a screen, only read."""
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if screen is not None:
                pass_on(line, screen)


def _unexplained(code: int, folder: Path) -> PacelineError:
    reason = RunFolder(folder).read_status().get("reason") or f"the run ended with exit code {code}"
    error = error_kind(code)(str(reason), where=str(folder), hint=f"paceline logs {folder}")
    error.exit_code = code
    return error


def _environment() -> dict[str, str]:
    """The environment with this process's import path, so the child can import the same modules."""
    paths = [str(Path(path or ".").absolute()) for path in sys.path]
    plain = {name: value for name, value in os.environ.items() if name != OUTPUT}
    plain |= trust_variables()
    return {**plain, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONIOENCODING": "utf-8"}
