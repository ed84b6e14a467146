"""`python -m paceline.launch.child_guard [OPTIONS] COMMAND...`: runs a command that ends with the guard's parent.

`--parent IDENTITY` names the parent. If the parent ends (also by `kill -9`) or closes the standard input of the guard,
the guard asks the command to stop, and kills it after a grace period. `paceline train` then saves and exits. If the
guard itself is killed, the kernel asks the command to stop.

With `--hide FOLDER`, the output of the command passes through the guard and loses the path of FOLDER, which is removed
when the parent ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

from paceline.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from paceline.runtime.signals import SIGNAL_WAIT_S, when_process_ends

# The parent starts the guard with these blocked, so that none is lost before the guard can pass it on.
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_GRACE_S = 30.0
_LAST_OUTPUT_S = 2.0
_PR_SET_PDEATHSIG = 1


class Command(Protocol):
    """The running command: what the guard uses of subprocess.Popen."""

    @property
    def stdout(self) -> IO[bytes] | None: ...
    @property
    def stderr(self) -> IO[bytes] | None: ...
    def wait(self, timeout: float, /) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def main(arguments: list[str]) -> int:
    options = {"--parent": "", "--hide": ""}
    while arguments[0] in options:
        name, value, *arguments = arguments
        options[name] = value
    return run_guarded(options, arguments, _execute)


def run_guarded(
    options: Mapping[str, str], arguments: list[str], start: Callable[[list[str], int | None], Command]
) -> int:
    """Start the command and wait for its end. `start` gets its arguments, and PIPE if its output is filtered."""
    hidden = Path(options["--hide"]) if options.get("--hide") else None
    children: list[Command] = []
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if children:
            children[0].send_signal(number)
        else:
            early.append(number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    if early:  # there is nothing to save
        return EXIT_INTERRUPTED if early[0] == signal.SIGINT else EXIT_PREEMPTED
    pipe = None if hidden is None else subprocess.PIPE
    child = start(arguments, pipe)
    children.append(child)
    for received in early:
        child.send_signal(received)
    printers = [
        threading.Thread(target=_print_on, args=(source, screen, hidden), daemon=True)
        for source, screen in ((child.stdout, sys.stdout.buffer), (child.stderr, sys.stderr.buffer))
        if source is not None
    ]
    end = partial(_end, child)
    for thread in (*printers, threading.Thread(target=_wait_for_end_of_input, args=(end,), daemon=True)):
        thread.start()
    if options.get("--parent"):
        when_process_ends(options["--parent"], end)
    code = None
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(SIGNAL_WAIT_S)
    for printer in printers:
        printer.join(_LAST_OUTPUT_S)  # with a limit: a process that the command has left behind may hold the pipe
    return code if code >= 0 else 128 - code


def _execute(arguments: list[str], pipe: int | None) -> Command:
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        preexec_fn=make_stop_with_guard(),  # noqa: PLW1509 - the guard has no other thread yet
    )


def without_folder(text: str, folder: Path) -> str:
    """The text without the path of this folder, which is temporary."""
    return text.replace(f"{folder}/run", "the run folder").replace(f"{folder}/", "")


def make_stop_with_guard() -> Callable[[], None]:
    """For the new process, before it becomes the command: the kernel sends it SIGTERM when the guard is gone."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    guard = os.getpid()

    def stop_with_guard() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != guard:  # it has been killed before the call
                os._exit(EXIT_PREEMPTED)

    return stop_with_guard


def _print_on(source: IO[bytes], screen: IO[bytes], folder: Path) -> None:
    """Copy line by line, to the end: a command with a full pipe would wait."""
    for line in source:
        text = without_folder(line.decode(errors="surrogateescape"), folder)
        with suppress(OSError, ValueError):  # the screen may be closed
            screen.write(text.encode(errors="surrogateescape"))
            screen.flush()


def _wait_for_end_of_input(then: Callable[[], None]) -> None:
    """The parent closes the pipe to stop the command. Its end alone may not close it: forked processes have copies."""
    while os.read(0, 1024):
        pass
    then()


def _end(child: Command) -> None:
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)
    child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
