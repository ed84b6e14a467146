"""A ride in processes of its own: `paceline train`, started from Python, with its words passed on.

Supervisors have signal handlers, fork servers and the last word on exit codes; none of that belongs into a notebook's
process. The leash sees to it that nothing rides on when this process is gone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from paceline.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    CheckpointError,
    DataError,
    NonFiniteError,
    PacelineError,
    Preempted,
    UserError,
)
from paceline.metrics.screen import OUTPUT, pass_on
from paceline.runs.folder import RunFolder

_LEASH = "paceline.integrations.metaflow_support.leash"
_KINDS = {kind.exit_code: kind for kind in (UserError, DataError, CheckpointError, Preempted, NonFiniteError)}
_PART = re.compile(r"^  (where|got|allowed|try): +", re.MULTILINE)


def ride(arguments: list[str], folder: Path, *, quiet: bool) -> None:
    """Train to the end; raises what the command would have exited with."""
    process, story, troubles = _start(["train", *arguments, *(["--quiet"] if quiet else [])])
    screen: list[str] = []  # of the error it ended with, for the exception
    listener = threading.Thread(target=_listen, args=(troubles, screen), daemon=True)
    listener.start()
    is_interrupted = False
    with process, story:
        while True:
            try:
                for line in story:
                    if not quiet:
                        pass_on(line, sys.stdout)
                listener.join()
                code = process.wait()
                break
            except KeyboardInterrupt:
                is_interrupted = True
                process.send_signal(signal.SIGINT)
    if is_interrupted or code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code != EXIT_FINISHED:
        raise _error(code, "".join(screen), folder)


def _start(words: list[str]) -> tuple[subprocess.Popen[bytes], IO[str], IO[str]]:
    """The command, and what it writes to standard output and error."""
    story, story_in = os.pipe()
    troubles, troubles_in = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", _LEASH, sys.executable, "-m", "paceline", *words],
        stdin=subprocess.PIPE,
        stdout=story_in,
        stderr=troubles_in,
        # The leash holds these ends too: when we are killed, ranks that speak must not die before they have saved.
        pass_fds=(story, troubles),
        env=_environment(),
        start_new_session=True,  # Ctrl-C comes to us, and we pass it on: once
    )
    os.close(story_in)
    os.close(troubles_in)
    return process, _reader(story), _reader(troubles)


def _reader(descriptor: int) -> IO[str]:
    return os.fdopen(descriptor, encoding="utf-8", errors="replace")


def _listen(stream: IO[str], screen: list[str]) -> None:
    """Pass on what is said on standard error, but keep an error's screen: it is told by the exception."""
    with stream:
        for line in stream:
            if screen or line.startswith("error: "):
                screen.append(line)
            else:
                pass_on(line, sys.stderr)


def _error(code: int, screen: str, folder: Path) -> PacelineError:
    kind = _KINDS.get(code, PacelineError)
    if screen:
        what, *parts = _PART.split(screen.removeprefix("error: ").rstrip())
        told = {
            name: re.sub(r"\n {11}", "\n", text.rstrip()) for name, text in zip(parts[::2], parts[1::2], strict=True)
        }
        hint = told.pop("try", None)
        error = kind(what.rstrip(), **told, hint=hint)
    else:
        reason = RunFolder(folder).read_status().get("reason") or f"the run ended with exit code {code}"
        error = kind(str(reason), where=str(folder), hint=f"paceline logs {folder}")
    error.exit_code = code
    return error


def _environment() -> dict[str, str]:
    """What can be imported here can be imported there."""
    paths = [str(Path(path or ".").absolute()) for path in sys.path]
    plain = {name: value for name, value in os.environ.items() if name != OUTPUT}
    return {**plain, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONIOENCODING": "utf-8"}
