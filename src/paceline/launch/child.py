"""`paceline` as a child process. It stops when this process ends, however it ends, and reports its error as JSON.

The child runs under a guard (launch/child_guard.py), in a session of its own: Ctrl-C in the terminal reaches this
process only, which passes it on once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from paceline.errors import PacelineError, error_from_json
from paceline.launch.child_guard import PASSED_ON
from paceline.launch.warm import WarmProcess, find_warm_server
from paceline.runs.interpreter import python_command
from paceline.runs.machine import end_group, identity_of_this_process, wait_for_group

_ERROR_FILE = "PACELINE_ERROR_FILE"  # where a child writes its error
_SHOWS_ERROR = "PACELINE_PARENT_SHOWS_ERROR"  # set if the child need not print it
_GUARD = "paceline.launch.child_guard"
_STOP_GRACE_S = 10.0
_ABANDONED_GRACE_S = 30.0

Output = int | IO[Any] | None  # as subprocess.Popen takes it


class Child:
    """A running command. Its exit code is that of the command; 128 + N if signal N has ended it."""

    def __init__(self, process: subprocess.Popen[bytes] | WarmProcess, error_file: Path) -> None:
        self._process = process
        self._error_file = error_file

    def wait(self, timeout_s: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired if the command still runs after this time."""
        code = self._process.wait(timeout_s)
        return code if code >= 0 else 128 - code  # the guard itself was killed

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send_signal(self, number: int) -> None:
        """To the command. The guard passes on the signals that ask for a stop."""
        self._process.send_signal(number)

    def stop_as_if_abandoned(self) -> None:
        """Let the guard end the command: it saves if it can, and is killed after a grace."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def error(self) -> PacelineError | None:
        """The error that has ended the command; None if it has written none, for example because it was killed."""
        try:
            return error_from_json(json.loads(self._error_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            return None


@contextmanager
def start_child(
    arguments: Sequence[str],
    *,
    stdout: Output = None,
    stderr: Output = None,
    kept_open: Sequence[int] = (),
    shows_error: bool = False,
    hidden_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    warm_threads: int = 0,
) -> Iterator[Child]:
    """Run `paceline ARGUMENTS`. An exception inside of the block, such as Ctrl-C, ends the command and its ranks.

    shows_error: the caller shows `Child.error`, so the command does not print it.
    hidden_folder: what is printed does not name it; for folders that do not last.
    kept_open: descriptors that the guard holds open. If this process is killed, a command that writes into a pipe must
    not fail at the pipe before it has saved.
    warm_threads: CPU threads of a rank. With a number, a process that has torch loaded is kept for the next call, and
    this call uses it if there is one (launch/warm.py). `stdout` and `stderr` are descriptors then.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-child-") as folder:
        error_file = Path(folder) / "error.json"
        variables = {_ERROR_FILE: str(error_file), _SHOWS_ERROR: "1" if shows_error else ""}
        options = {"--parent": identity_of_this_process()}
        options |= {} if hidden_folder is None else {"--hide": str(hidden_folder)}
        variables = {**(os.environ if environment is None else environment), **variables}
        warm = find_warm_server(variables, warm_threads) if warm_threads else None
        process: subprocess.Popen[bytes] | WarmProcess | None = None
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until the guard can pass them on
        try:
            if warm is not None:
                assert isinstance(stdout, int)
                assert isinstance(stderr, int)
                process = warm.start(options, arguments, variables, streams=(stdout, stderr), kept_open=kept_open)
            if process is None:
                words = [word for pair in options.items() for word in pair]
                process = subprocess.Popen(
                    [*python_command("-m", _GUARD, *words), *python_command("-m", "paceline", *arguments)],
                    stdin=subprocess.PIPE,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=tuple(kept_open),
                    env=variables,
                    start_new_session=True,
                )
        except BaseException:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            yield Child(process, error_file)
            if process.wait() < 0:  # the guard was killed, and the kernel has asked the command to stop
                wait_for_group(process.pid, _ABANDONED_GRACE_S)
        except BaseException:
            _interrupt(process)
            raise
        finally:
            assert process.stdin is not None
            process.stdin.close()


def _interrupt(process: subprocess.Popen[bytes] | WarmProcess) -> None:
    """Ctrl-C for the command, which ends its ranks. Only the guard gets the signal: it passes it on once."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_GRACE_S)
    if isinstance(process, WarmProcess):
        process.kill_group()
    else:
        end_group(process, ask=signal.SIGKILL, grace_s=0.0)


def report_error(error: dict[str, object] | None) -> bool:
    """To the process that has started this one with `start_child`. Whether that process shows it to the user."""
    path = os.environ.get(_ERROR_FILE)
    if not path or error is None:
        return False
    draft = Path(path).with_suffix(".draft")
    try:
        draft.write_text(json.dumps(error), encoding="utf-8")
        draft.rename(path)
    except OSError:
        return False
    return bool(os.environ.get(_SHOWS_ERROR))
