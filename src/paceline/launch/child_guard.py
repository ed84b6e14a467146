"""`python -m paceline.launch.child_guard COMMAND...`: runs a command that ends with the process that has started it.

The parent holds the other end of the guard's standard input. If the parent ends, also by `kill -9`, the pipe closes.
The guard then asks the command to stop, which for `paceline train` means to save and exit, and kills it after a grace.

With `--hide FOLDER` before it, the output of the command passes through the guard and loses the path of FOLDER, which
is removed when the parent ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from paceline.world.signals import HEAR_SIGNALS_S

_GRACE_S = 30.0
_LAST_OUTPUT_S = 2.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def main(command: list[str]) -> int:
    hidden = Path(command[1]) if command[0] == "--hide" else None
    pipe = None if hidden is None else subprocess.PIPE
    words = command if hidden is None else command[2:]
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    printers = [
        threading.Thread(target=_print_on, args=(source, screen, hidden), daemon=True)
        for source, screen in ((child.stdout, sys.stdout.buffer), (child.stderr, sys.stderr.buffer))
        if source is not None
    ]
    for printer in printers:
        printer.start()
    for number in _PASSED_ON:
        signal.signal(number, lambda received, frame: child.send_signal(received))
    threading.Thread(target=_follow_parent, args=(child,), daemon=True).start()
    code = None
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(HEAR_SIGNALS_S)
    for printer in printers:
        printer.join(_LAST_OUTPUT_S)  # not for ever: a process that the command left behind may hold the pipe
    return code if code >= 0 else 128 - code


def without_folder(text: str, folder: Path) -> str:
    """A text for people who will not find this folder."""
    return text.replace(f"{folder}/run", "the run folder").replace(f"{folder}/", "")


def _print_on(source: IO[bytes], screen: IO[bytes], folder: Path) -> None:
    """Line by line, to the end: a command whose pipe is full would stand still."""
    for line in source:
        text = without_folder(line.decode(errors="surrogateescape"), folder)
        with suppress(OSError, ValueError):  # a screen that is gone ends nothing
            screen.write(text.encode(errors="surrogateescape"))
            screen.flush()


def _follow_parent(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):
        pass
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)
    child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
