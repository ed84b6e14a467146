"""`python -m paceline.integrations.metaflow_support.leash COMMAND...`: a command that does not outlive its parent.

The parent holds the other end of our standard input. However it dies, `kill -9` included, the pipe closes: the
command is asked to stop, which for `paceline train` means to save and leave, and after a grace it is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from paceline.world.signals import HEAR_SIGNALS_S

_GRACE_S = 30.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT)


def main(command: list[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    for number in _PASSED_ON:
        signal.signal(number, lambda received, frame: child.send_signal(received))
    threading.Thread(target=_follow_parent, args=(child,), daemon=True).start()
    code = None
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(HEAR_SIGNALS_S)
    return code if code >= 0 else 128 - code


def _follow_parent(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):
        pass
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)
    child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
