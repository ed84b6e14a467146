"""`python -m paceline.launch.warm_server SOCKET`: has torch loaded, and forks a guarded `paceline` for each request.

`paceline.train` keeps one such process between calls (launch/warm.py). A request becomes the same processes as without
it: a guard (launch/child_guard.py) in a session of its own, the command, and the fork server of the command's ranks.
They are forked instead of executed, so Python and torch are not loaded again. No process serves two runs, and this
process runs no code of a user and starts no thread.

It ends when its parent ends, also by `kill -9`, or closes the socket.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from typing import Any, NoReturn

from paceline.launch.child_guard import PASSED_ON, make_stop_with_guard, run_guarded
from paceline.launch.rank_processes import (
    FORKED_PRELOADS,
    THREADS,
    note_warm_server,
    signals_blocked,
    start_fork_server,
)
from paceline.runs.interpreter import safe_path
from paceline.runs.machine import ProcessHandle
from paceline.runtime.resources import require_open_files

# What every run loads. `__main__` is the command.
_PRELOADED = (
    *("paceline.__main__", "paceline.runs.interpreter", "paceline.launch.start", "paceline.training.rehearse"),
    *("paceline.settings.command_line", "numpy.random"),
    *FORKED_PRELOADS,
)
# What many runs load. One is loaded whenever there is nothing to do, so the first request does not wait for them.
_LATER = (
    *("paceline.models.cnn", "paceline.models.mlp", "paceline.data.sources.shapes", "paceline.data.sources.synthetic"),
    *("torch.utils.tensorboard", "paceline.models.resnet", "paceline.data.sources.cifar10"),
    *("paceline.data.sources.folder", "paceline.data.sources.custom"),
)
_POLL_S = 0.25  # for the end of the parent
_MOST_DESCRIPTORS = 16
_LENGTH_BYTES = 8


def main(descriptor: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # the guard unblocks them
    parent, threads = os.getppid(), os.environ.get(THREADS, "")
    connection = socket.socket(fileno=descriptor)
    gc.disable()  # loading torch makes hundreds of thousands of objects that stay
    for name in _PRELOADED:
        importlib.import_module(name)
    del sys.modules["paceline.__main__"]  # it is run as `__main__`
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps guards; they report their exit code themselves
    connection.sendall(b"L")  # loaded
    later = list(_LATER)
    while os.getppid() == parent:
        if not select.select([connection], [], [], _POLL_S)[0]:
            _load_next(later)
            continue
        request, descriptors = _receive(connection)
        if request is None:
            return
        pid = os.fork()
        if pid == 0:
            connection.close()
            _be_a_guard(request, descriptors, threads)
        for number in descriptors:
            os.close(number)
        connection.sendall(pid.to_bytes(_LENGTH_BYTES, "big"))


def _load_next(names: list[str]) -> None:
    name = names.pop(0) if names else ""
    # TensorBoard would load TensorFlow, which starts threads. A process with threads must not fork.
    if name and not ("tensorboard" in name and importlib.util.find_spec("tensorflow") is not None):
        with suppress(Exception):  # an optional package is missing or broken
            importlib.import_module(name)
        gc.freeze()


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """A request and the descriptors that belong to it; None if the parent is gone."""
    head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _MOST_DESCRIPTORS)
    text = b""
    length = int.from_bytes(head, "big")
    while len(head) == _LENGTH_BYTES and len(text) < length:
        piece = connection.recv(length - len(text))
        if not piece:
            return None, descriptors
        text += piece
    return (json.loads(text) if text else None), descriptors


def send_request(connection: socket.socket, request: dict[str, Any], descriptors: list[int]) -> int:
    """For the parent. `descriptors`: standard input, output and error of the guard, one for its exit code, and others
    that it holds open. Returns the process number of the guard. Raises OSError if the server is gone."""
    text = json.dumps(request).encode()
    socket.send_fds(connection, [len(text).to_bytes(_LENGTH_BYTES, "big")], descriptors)
    connection.sendall(text)
    answer = connection.recv(_LENGTH_BYTES, socket.MSG_WAITALL)
    if len(answer) != _LENGTH_BYTES:
        raise ConnectionResetError("the warm server has ended")
    return int.from_bytes(answer, "big")


def _be_a_guard(request: dict[str, Any], descriptors: list[int], threads: str) -> NoReturn:
    """In the new process."""
    code = 1
    *streams, status = descriptors[:4]
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        # Those of this process are made for /dev/null.
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]  # noqa: SIM115
            2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        gc.enable()

        def start(arguments: list[str], pipe: int | None) -> ForkedCommand:
            return ForkedCommand(partial(_be_the_command, arguments, descriptors[3:], threads))

        code = run_guarded(request["options"], request["arguments"], start)
        os.write(status, str(code).encode())
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


class ForkedCommand:
    """The command as a forked process, with the methods of subprocess.Popen that the guard uses."""

    stdout = stderr = None

    def __init__(self, be_the_command: Callable[[], NoReturn]) -> None:
        stop_with_guard = make_stop_with_guard()
        with signals_blocked(*PASSED_ON):  # until the new process has its own handlers
            self.pid = os.fork()
            if self.pid == 0:
                stop_with_guard()
                be_the_command()
        self._handle = ProcessHandle(self.pid)  # not reaped yet, so it is the new process
        self._code: int | None = None
        self._lock = threading.RLock()  # two threads of the guard wait, and a handler may interrupt one of them

    def wait(self, timeout_s: float) -> int:
        descriptor = os.pidfd_open(self.pid) if self._code is None else None
        if descriptor is not None:
            try:
                has_ended = bool(select.select([descriptor], [], [], timeout_s)[0])
            finally:
                os.close(descriptor)
            if not has_ended:
                raise subprocess.TimeoutExpired("paceline", timeout_s)
        with self._lock:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self._code is None:
                self._handle.send(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _be_the_command(arguments: list[str], closed: list[int], threads: str) -> NoReturn:
    """In the new process: what `python -m paceline ARGUMENTS` does."""
    code: Any = 1
    try:
        for passed_on in PASSED_ON:
            is_interrupt = passed_on == signal.SIGINT
            signal.signal(passed_on, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        for number in closed:
            os.close(number)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()  # forked processes would draw the same numbers in every run
        require_open_files()
        _fork_the_fork_server()
        note_warm_server(threads)
        sys.argv = ["paceline", *arguments]
        runpy.run_module("paceline", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _fork_the_fork_server() -> None:
    """Start multiprocessing's fork server as a fork of this process, before the command has any state."""
    with safe_path():
        resource_tracker.ensure_running()
    internals: Any = util
    execute, internals.spawnv_passfds = internals.spawnv_passfds, _fork_instead
    try:
        start_fork_server(FORKED_PRELOADS)
    finally:
        internals.spawnv_passfds = execute


def _fork_instead(path: str, arguments: list[str], kept: list[int]) -> int:
    """Like `multiprocessing.util.spawnv_passfds` for `python -c CODE`, but the code runs in a fork."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - names, not paths
            if number > 2 and number not in kept:
                try:
                    os.close(number)
                except OSError:
                    continue  # that of the list itself
        server: Any = forkserver._forkserver
        server._lock = threading.Lock()  # it was held by the process that forked
        exec(arguments[-1], {})
    except SystemExit:
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]))
