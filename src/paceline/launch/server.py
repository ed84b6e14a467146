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

from paceline.runs.interpreter import forget_safe_path

IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
for _number in IGNORED:
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # blocked by the launcher until now

forget_safe_path()
gc.disable()
os.register_at_fork(before=gc.freeze, after_in_child=gc.enable)
