"""Loaded first by the server that forks the ranks, and by nothing else.

A scheduler sends its signals to every process of a job. This server has nothing to save, and ranks start out
deaf until they have handlers of their own; it ends when the last process that knows it has ended.
"""

from __future__ import annotations

import signal

for _name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
    signal.signal(getattr(signal, _name), signal.SIG_IGN)
