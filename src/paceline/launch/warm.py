"""Keeps a process with torch loaded between calls of `paceline.train` (launch/warm_server.py).

One server belongs to this process. It is replaced if something changes that a library reads when it is loaded:
environment variables, the import path, the working folder, the usable cores, or the CPU threads of a rank.
"""

from __future__ import annotations

import atexit
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.launch.rank_processes import LIBRARY_VARIABLES, THREADS
from paceline.launch.warm_server import send_request
from paceline.runs.interpreter import python_command
from paceline.runs.machine import ProcessHandle

WARM = "PACELINE_WARM"  # off: every call starts its own processes
_MODULE = "paceline.launch.warm_server"
_OURS = "PACELINE_"  # variables of Paceline are read when they are used, and come with each request
_one_at_a_time = threading.Lock()
_current: WarmServer | None = None


class WarmProcess:
    """A guard that the warm server has forked, with the methods of subprocess.Popen that its caller uses."""

    def __init__(self, pid: int, stdin: int, status: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.returncode: int | None = None
        self._status = os.fdopen(status, "rb", buffering=0)
        try:
            self._handle: ProcessHandle | None = ProcessHandle(pid)
        except ProcessLookupError:
            self._handle = None

    def wait(self, timeout_s: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("paceline", timeout_s or 0.0)
            text = self._status.read()
            self.returncode = int(text) if text else -signal.SIGKILL  # without a code, the guard itself was killed
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._handle is not None:
            self._handle.send(number)

    def kill_group(self) -> None:
        """The guard and all processes of its run. Of a guard that has ended, the run has ended."""
        if self.poll() is None and self._handle is not None:
            self._handle.kill_group()
        self.wait()


class WarmServer:
    def __init__(self, command: list[str], environment: dict[str, str], key: object) -> None:
        self.key = key
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        atexit.register(self.close)

    def wait_until_loaded(self) -> None:
        if not self._connection.recv(1):
            raise ConnectionResetError("the warm server has ended")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def start(
        self,
        options: Mapping[str, str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        streams: tuple[int, int],
        kept_open: Sequence[int],
    ) -> WarmProcess | None:
        """Run `paceline ARGUMENTS` under a guard. `streams`: standard output and error. None if the server is gone."""
        request = {
            "options": dict(options),
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": str(Path.cwd()),
        }
        stdin, stdin_end = os.pipe()
        status, status_end = os.pipe()
        try:
            with self._lock:
                pid = send_request(self._connection, request, [stdin, *streams, status_end, *kept_open])
        except OSError:
            os.close(stdin_end)
            os.close(status)
            return None
        finally:
            os.close(stdin)
            os.close(status_end)
        return WarmProcess(pid, stdin_end, status)

    def close(self) -> None:
        """End the server, also while it loads. Runs that it has started continue."""
        atexit.unregister(self.close)
        with self._lock:  # not in the middle of a request
            self._connection.close()
            if self._pid == os.getpid():  # not in a fork of this process
                self._process.kill()
                self._process.wait()


def find_warm_server(environment: Mapping[str, str], threads: int) -> WarmServer | None:
    """A process that has torch loaded, with this environment and these CPU threads per rank. Waits until it is loaded.

    None if there can be no such process.
    """
    global _current
    if sys.platform != "linux" or os.environ.get(WARM) == "off" or not hasattr(os, "pidfd_open"):
        return None
    plain = {name: value for name, value in environment.items() if not name.startswith(_OURS)}
    loaded = {**LIBRARY_VARIABLES, **plain, THREADS: str(threads)}
    command = python_command("-m", _MODULE)
    limits = (sorted(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_NOFILE))
    key = (os.getpid(), command, loaded, Path.cwd(), limits)
    with _one_at_a_time:
        server, _current = _current, None  # Ctrl-C in this block leaves none behind
        if server is not None and (server.key != key or not server.is_running):
            server.close()
            server = None
        if server is None:
            server = WarmServer(command, loaded, key)
            try:
                server.wait_until_loaded()
            except BaseException as error:
                server.close()
                if isinstance(error, OSError):
                    return None
                raise
        _current = server
        return server
