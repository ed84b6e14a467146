"""The fork server loads this module first. No other process loads it.

A scheduler sends its signals to every process of a job. The server ignores them, and so do ranks until they have their
own handlers. The server exits when its launcher and all ranks have exited.

The garbage collector is off in the server: loading torch makes hundreds of thousands of objects that stay. A rank
collects only its own objects, which also keeps the memory of the others shared.
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
