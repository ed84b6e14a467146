"""Keeps the process usable after a call into the user's code: its working folder and its standard streams."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager


@contextmanager
def process_kept() -> Iterator[None]:
    """Restore the working folder: relative paths of the run are read again later.

    Restore standard output and error too if they can no longer be written to, such as None. A stream that the user's
    code has put in their place stays.
    """
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    with chdir("."):
        try:
            yield
        finally:
            for name, before in streams.items():
                now = getattr(sys, name, None)
                if not (callable(getattr(now, "write", None)) and callable(getattr(now, "flush", None))):
                    setattr(sys, name, before)
