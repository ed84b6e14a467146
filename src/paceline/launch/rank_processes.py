"""Starts the ranks of this node, collects their exits and ends them. The only launcher: commands and tests use it.

Ranks are forked from a server that has torch loaded, so a rank starts in tenths of a second. The process that uses this
module, the launcher, does not load torch.

How ranks end with their launcher:

- If the launcher ends in any way, also by `kill -9`, a thread of each rank notices it: it waits for the launcher's
  process handle (`runtime/signals.py`). A training rank then saves and exits; other ranks exit immediately.
- If the launcher runs, it sends SIGKILL to its ranks through process handles when it leaves the `with` block. A process
  number alone could belong to another process by then.

The kernel's parent-death signal is not used here, because the parent of a rank is the fork server. A pipe is not used
either, because every forked rank would hold a copy of the launcher's end.

Ctrl-C: the terminal sends SIGINT to every process of the job. Only the launcher handles it. The server and the ranks
ignore it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

from paceline.runs.interpreter import safe_path
from paceline.runs.machine import ProcessHandle, find_forked, identity_of_this_process
from paceline.runtime.detect import STORE_FD
from paceline.runtime.signals import SIGNAL_WAIT_S, exit_with_process

THREADS = "OMP_NUM_THREADS"
# Libraries read these when they are loaded.
LIBRARY_VARIABLES = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # our report describes a closed socket
    "KINETO_LOG_LEVEL": "6",  # torch's profiler would print a line otherwise
}
FORKED_PRELOADS = ("paceline.training.worker",)
_warm_threads: str | None = None  # THREADS when torch was loaded, if the server is a fork of a process with torch
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class RankProcesses:
    """The rank processes of this node. Leaving the `with` block ends those that still run."""

    def __init__(self, *, can_save: bool = False) -> None:
        """can_save: a rank handles stop signals and the end of its launcher itself, and saves before it exits."""
        self._can_save = can_save
        self._processes: dict[int, Any] = {}
        self._handles: dict[int, ProcessHandle | None] = {}  # None: it had exited before its handle was opened

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(
        self,
        rank: int,
        main: Callable[..., None],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Run `main(*arguments)` in a new process. The fork server finds `main` by its name, so it is importable.

        environment: variables in addition to those of this process. listener: the rank gets this socket for the store
        of the ranks, as the descriptor STORE_FD. The launcher opens it, so no other process can take the port.
        """
        launcher = None if self._can_save else identity_of_this_process()
        process = multiprocessing.get_context("forkserver").Process(
            target=_run_rank, args=(launcher, {**os.environ, **(environment or {})}, listener, main, arguments)
        )
        process.start()
        assert process.pid is not None
        self._handles[rank] = find_forked(process.pid)
        self._processes[rank] = process

    def handles(self) -> dict[int, ProcessHandle | None]:
        """Of the ranks that were started so far."""
        return dict(self._handles)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all ranks have exited, or after the timeout."""
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while running := [process.sentinel for process in self._processes.values() if process.exitcode is None]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            connection.wait(running, min(left_s, SIGNAL_WAIT_S))

    def kill(self, rank: int) -> None:
        handle = self._handles[rank]
        if handle is not None:
            handle.send(signal.SIGKILL)

    def end(self, grace_s: float = 0.0) -> None:
        """Give the ranks this time to exit, kill the others, and reap all."""
        self.wait(grace_s)
        for rank in self._handles:
            self.kill(rank)
        for process in self._processes.values():
            process.join()

    def exit_codes(self) -> dict[int, int | None]:
        """Negative: the signal that has ended the rank."""
        return {rank: process.exitcode for rank, process in self._processes.items()}


def _run_rank(
    launcher: str | None,
    environment: dict[str, str],
    listener: socket.socket | None,
    main: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    """In the new process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if launcher is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        exit_with_process(launcher)
    if listener is not None:
        environment[STORE_FD] = str(listener.detach())
    os.environ.clear()
    os.environ.update(environment)
    main(*arguments)


def start_fork_server(preloaded: Sequence[str]) -> None:
    """Start the server, which loads these modules in the background. It cannot load more later.

    A scheduler sends stop signals to every process of a job. The server starts with them blocked, and ignores them as
    soon as it has loaded `launch/server.py`.

    A command that the warm server has forked has a fork server already (launch/warm_server.py).
    """
    if _warm_threads is not None:
        if os.environ.get(THREADS) == _warm_threads:
            return
        _end_warm_server()
    multiprocessing.set_forkserver_preload(["paceline.launch.server", *preloaded])
    with safe_path():
        resource_tracker.ensure_running()  # first: `forkserver` would start it inside the block, and unblock signals
        with signals_blocked(*_STOP_SIGNALS):
            forkserver.ensure_running()


def note_warm_server(threads: str) -> None:
    """The server that runs is a fork of a process that has loaded its libraries with this value of THREADS."""
    global _warm_threads
    _warm_threads = threads


def _end_warm_server() -> None:
    """Libraries must be loaded with another number of threads. multiprocessing starts a new server then."""
    global _warm_threads
    _warm_threads = None
    server = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    end_fork_server()
    with suppress(ChildProcessError):
        assert server is not None
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)  # multiprocessing reaps it


def end_fork_server() -> None:
    """Kill the server and all its children, including ranks that are not registered yet."""
    server = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if server is None:
        return
    with suppress(ProcessLookupError, ChildProcessError):
        handle = ProcessHandle(server)
        handle.send(signal.SIGSTOP)
        os.waitpid(server, os.WUNTRACED)  # a stopped server forks no more ranks while its children are listed
        for child in _children_of(server):
            with suppress(ProcessLookupError):
                ProcessHandle(child, parent=server).send(signal.SIGKILL)
        handle.send(signal.SIGKILL)


def _children_of(pid: int) -> list[int]:
    try:
        return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # no /proc: end the registered ranks at least
        return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


@contextmanager
def signals_blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Deliver these signals at the end of the block. Processes that start inside inherit the blocked mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
