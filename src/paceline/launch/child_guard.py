"""`python -m paceline.launch.child_guard [OPTIONS] COMMAND...`: runs a command that ends with the guard's parent.

`--parent IDENTITY` names the parent. If it ends, also by `kill -9`, or closes the standard input of the guard, the
guard asks the command to stop, which for `paceline train` means to save and exit, and kills it after a grace. If the
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

from paceline.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from paceline.runs.process_handle import find_process
from paceline.runtime.signals import HEAR_SIGNALS_S

# The parent starts the guard with these blocked, so that none is lost before the guard can pass it on.
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_GRACE_S = 30.0
_LAST_OUTPUT_S = 2.0
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    options = {"--parent": "", "--hide": ""}
    while arguments[0] in options:
        name, value, *arguments = arguments
        options[name] = value
    hidden = Path(options["--hide"]) if options["--hide"] else None
    children: list[subprocess.Popen[bytes]] = []
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
    child = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        preexec_fn=_make_stop_with_guard(),  # noqa: PLW1509 - the guard has no other thread yet
    )
    children.append(child)
    for received in early:
        child.send_signal(received)
    printers = [
        threading.Thread(target=_print_on, args=(source, screen, hidden), daemon=True)
        for source, screen in ((child.stdout, sys.stdout.buffer), (child.stderr, sys.stderr.buffer))
        if source is not None
    ]
    for thread in (*printers, *_watchers(child, options["--parent"])):
        thread.start()
    code = None
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(HEAR_SIGNALS_S)
    for printer in printers:
        printer.join(_LAST_OUTPUT_S)  # with a limit: a process that the command has left behind may hold the pipe
    return code if code >= 0 else 128 - code


def without_folder(text: str, folder: Path) -> str:
    """A text for people who will not find this folder."""
    return text.replace(f"{folder}/run", "the run folder").replace(f"{folder}/", "")


def _make_stop_with_guard() -> Callable[[], None]:
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
    """Line by line, to the end: a command whose pipe is full would stand still."""
    for line in source:
        text = without_folder(line.decode(errors="surrogateescape"), folder)
        with suppress(OSError, ValueError):  # a screen that is gone ends nothing
            screen.write(text.encode(errors="surrogateescape"))
            screen.flush()


def _watchers(child: subprocess.Popen[bytes], parent: str) -> list[threading.Thread]:
    """Two signs that the parent is gone. A process that it has forked may hold its end of the pipe."""

    def wait_for_end_of_input() -> None:
        while os.read(0, 1024):
            pass
        _end(child)

    def wait_for_end_of_parent() -> None:
        process = find_process(parent)
        if process is not None:
            process.wait()
        _end(child)

    waits = [wait_for_end_of_input, *([wait_for_end_of_parent] if parent else [])]
    return [threading.Thread(target=wait, daemon=True) for wait in waits]


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)
    child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
