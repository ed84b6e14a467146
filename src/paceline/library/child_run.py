"""Runs `paceline train` in a child process from Python, and prints its output.

A supervisor has signal handlers and a fork server, and decides the exit code. None of that belongs in the process of
a notebook.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import IO

from paceline.errors import EXIT_FINISHED, EXIT_INTERRUPTED, PacelineError, error_kind
from paceline.launch.child import Child, start_child
from paceline.metrics.screen import OUTPUT, pass_on
from paceline.runs.folder import RunFolder


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
        reader = threading.Thread(target=_print_errors, args=(_reader(errors),), daemon=True)
        reader.start()
        code, is_interrupted = _print_until_end(child, _reader(output), quiet=quiet)
        reader.join()
        error = child.error()
    if is_interrupted or code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code != EXIT_FINISHED:
        raise error or _unexplained(code, folder)


def _print_until_end(child: Child, output: IO[str], *, quiet: bool) -> tuple[int, bool]:
    """The exit code, and whether Ctrl-C was pressed here. After Ctrl-C the command saves and exits."""
    is_interrupted = False
    with output:
        while True:
            try:
                for line in output:
                    if not quiet:
                        pass_on(line, sys.stdout)
                return child.wait(), is_interrupted
            except KeyboardInterrupt:
                is_interrupted = True
                child.send_signal(signal.SIGINT)


def _reader(descriptor: int) -> IO[str]:
    return os.fdopen(descriptor, encoding="utf-8", errors="replace")


def _print_errors(stream: IO[str]) -> None:
    with stream:
        for line in stream:
            pass_on(line, sys.stderr)


def _unexplained(code: int, folder: Path) -> PacelineError:
    reason = RunFolder(folder).read_status().get("reason") or f"the run ended with exit code {code}"
    error = error_kind(code)(str(reason), where=str(folder), hint=f"paceline logs {folder}")
    error.exit_code = code
    return error


def _environment() -> dict[str, str]:
    """The environment with this process's import path, so the child can import the same modules."""
    paths = [str(Path(path or ".").absolute()) for path in sys.path]
    plain = {name: value for name, value in os.environ.items() if name != OUTPUT}
    return {**plain, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONIOENCODING": "utf-8"}
