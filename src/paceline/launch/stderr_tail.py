"""A child's standard error, passed on to ours as it comes; its last lines are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress

_KEPT_BYTES = 4000


class StderrTail:
    """Reads the pipe of a child that was started with `stderr=subprocess.PIPE`."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stderr is not None
        self._pipe = child.stderr
        self._kept = b""
        self._thread = threading.Thread(target=self._pass_on, name="stderr", daemon=True)
        self._thread.start()

    def read(self, timeout_s: float = 1.0) -> str:
        """The last lines. A process that outlives the child may hold the pipe open: wait no longer than this."""
        self._thread.join(timeout_s)
        return self._kept.decode(errors="replace").strip()

    def _pass_on(self) -> None:
        with self._pipe, suppress(OSError):
            while chunk := os.read(self._pipe.fileno(), 1 << 16):
                self._kept = (self._kept + chunk)[-_KEPT_BYTES:]
                with suppress(OSError):  # our own standard error may be closed; the child must not notice
                    _write_all(sys.stderr.fileno(), chunk)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
