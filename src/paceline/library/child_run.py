"""Runs `paceline train` in a child process from Python, and prints its output.

A supervisor has signal handlers and a fork server, and decides the exit code. None of that belongs in the process of
a notebook.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from paceline.errors import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_PREEMPTED, PacelineError, error_kind
from paceline.launch.child import Child, start_child
from paceline.launch.request import decide_processes
from paceline.library.epochs import EpochWatch, OnEpoch, open_live_table
from paceline.metrics.screen import NO_FIGURES, OUTPUT, pass_on
from paceline.runs.folder import RunFolder
from paceline.runs.trust import trust_variables
from paceline.runtime.caller import CALLER_DIR
from paceline.runtime.detect import threads_per_rank
from paceline.settings.load import load_config

_LAST_OUTPUT_S = 2.0
_POLL_S = 0.05  # for epochs, and for Ctrl-C: Python handles signals between waits


def train_in_child(arguments: list[str], folder: Path, *, quiet: bool, on_epoch: OnEpoch | None = None) -> None:
    """Train to the end. Raises the error with which the command ended, or that of `on_epoch`."""
    (output, output_end), (errors, errors_end) = os.pipe(), os.pipe()
    words = ["train", *arguments, *(["--quiet"] if quiet else [])]
    table = None if quiet else open_live_table()
    functions: list[OnEpoch] = [table.show] if table is not None else []
    functions += [on_epoch] if on_epoch is not None else []
    output_mode = {OUTPUT: NO_FIGURES} if table is not None else {}
    with (
        tempfile.TemporaryDirectory(prefix="paceline-caller-") as caller_dir,
        start_child(
            words,
            stdout=output_end,
            stderr=errors_end,
            kept_open=(output, errors),
            shows_error=True,
            environment={**child_environment(), **output_mode, CALLER_DIR: caller_dir},
            warm_threads=_threads_of_a_rank(arguments),
        ) as child,
    ):
        os.close(output_end)
        os.close(errors_end)
        screens = ((output, None if quiet else sys.stdout), (errors, sys.stderr))
        readers = [threading.Thread(target=_print_on, args=pair, daemon=True) for pair in screens]
        for reader in readers:
            reader.start()
        watch = EpochWatch(Path(caller_dir), functions)
        code, is_interrupted = _wait(child, watch)
        for reader in readers:
            reader.join(_LAST_OUTPUT_S)  # with a limit: a process that a rank has left behind may hold the pipe
        error = child.error()
    if is_interrupted or code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if watch.error is not None:
        watch.error.add_note(f"The run is in {folder}; paceline.load_run({str(folder)!r}).resume() continues it.")
        raise watch.error
    is_stopped = watch.has_asked_for_end and code == EXIT_PREEMPTED  # a rank was lost at the same time
    if code != EXIT_FINISHED and not is_stopped:
        raise error or _unexplained(code, folder)


def _threads_of_a_rank(arguments: list[str]) -> int:
    """CPU threads. Libraries read the number when they are loaded."""
    recipe, *flags = arguments
    loaded = load_config(recipe, flags)
    return threads_per_rank(loaded.config.parallel, decide_processes(loaded))


def _wait(child: Child, watch: EpochWatch) -> tuple[int, bool]:
    """The exit code, and whether Ctrl-C was pressed here. The command then saves and ends by itself."""
    is_interrupted, code = False, None
    while True:
        try:
            if code is None:
                with suppress(subprocess.TimeoutExpired):
                    code = child.wait(_POLL_S)
            watch.look(child)  # also after the end: it may have been faster than this loop
            if code is not None:
                return code, is_interrupted
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


def child_environment() -> dict[str, str]:
    """The environment with this process's import path, so the child can import the same modules."""
    paths = [str(Path(path or ".").absolute()) for path in sys.path]
    plain = {name: value for name, value in os.environ.items() if name != OUTPUT}
    plain |= trust_variables()
    return {**plain, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONIOENCODING": "utf-8"}
