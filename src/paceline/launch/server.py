"""Loaded first by the server that forks the ranks, and by nothing else.

A scheduler sends its signals to every process of a job. This server has nothing to save, and ranks start out
deaf until they have handlers of their own; it ends when the last process that knows it has ended.

Nor does it look for garbage: loading torch makes hundreds of thousands of objects that stay. A rank looks for its own
garbage and leaves those alone, which also keeps their memory shared.
"""

from __future__ import annotations

import gc
import os
import signal

for _name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
    signal.signal(getattr(signal, _name), signal.SIG_IGN)

gc.disable()
os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)
