"""One attempt: the ranks of this node, started by us and looked after by our watch.

Nothing is restarted within an attempt and nothing of a broken attempt reaches the next one. Ranks are forked from a
server that has torch and this package loaded already, which makes a new attempt a matter of tenths of a second. This
process itself never loads torch.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any

from paceline.launch.rendezvous import Assignment, Rendezvous, StoppedWaiting
from paceline.launch.watch import RankSight, Watch
from paceline.runs.interpreter import safe_path
from paceline.runs.process_handle import ProcessHandle, find_forked, identity_of_this_process
from paceline.runtime.detect import ATTEMPT, STORE_FD, Nodes, RankEnvironment, rank_variables
from paceline.runtime.pulse import ATTEMPT_DIR, PEERS_FAILED
from paceline.runtime.secret import read_secret, take_secret
from paceline.runtime.signals import HEAR_SIGNALS_S, SUPERVISOR_PID

RankMain = Callable[[list[str], dict[str, str]], None]  # arguments, additions to the environment
_PRELOADED = ["paceline.launch.server", "paceline.training.worker"]


@dataclass(frozen=True)
class Attempt:
    """What to start."""

    number: int
    processes: int
    rank_main: RankMain  # importable by name: the server that forks the ranks looks it up
    arguments: list[str]
    stacks_of: Callable[[int], Path]  # where a rank's stacks go
    nodes: Nodes
    environment: dict[str, str] = field(default_factory=dict)  # for its ranks


@dataclass(frozen=True)
class AttemptEnd:
    """How it went on this node."""

    ranks: dict[int, RankSight]
    exit_codes: dict[int, int | None]  # negative: the signal that ended the rank
    hung: list[int]
    is_cut_short: bool = False  # a stop has ended ranks that had not begun; what the others say is a consequence

    @property
    def is_finished(self) -> bool:
        """Every rank has said so. An exit code of 0 alone may come from a function of the user's own."""
        has_left = {rank: sight.has_left for rank, sight in self.ranks.items()}
        return bool(self.exit_codes) and all(code == 0 and has_left[rank] for rank, code in self.exit_codes.items())


class Attempts:
    """Runs attempts, one at a time. Signals go to the ranks of the one under way."""

    def __init__(self, threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read by libraries while they are loaded
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a closed socket is told in our own words
        self._taken = take_secret()  # before anything inherits the environment
        self._watch: Watch | None = None
        self._is_asked_to_stop = False
        _start_fork_server()

    def stop_ranks(self, number: int) -> None:
        """Send a signal that asks for the end, now or as soon as there are ranks. There will be no new ones."""
        self._is_asked_to_stop = True
        if self._watch is not None:
            self._watch.stop_all(number)

    def run(self, attempt: Attempt) -> AttemptEnd:
        secret = read_secret(self._taken) if attempt.nodes.count > 1 else None
        attempt_dir = Path(tempfile.mkdtemp(prefix="paceline-attempt-"))
        ranks = _Ranks()
        self._watch = watch = Watch(attempt_dir, attempt.stacks_of, ranks.read_pids)
        rendezvous = Rendezvous(
            attempt.nodes,
            attempt.number,
            attempt.processes,
            secret,
            is_stopped=lambda: self._is_asked_to_stop,
            on_failure=lambda: _mark(attempt_dir / PEERS_FAILED),
        )
        watch.start()
        try:
            with suppress(StoppedWaiting):
                self._start(ranks, attempt, rendezvous.join(), attempt_dir)
                ranks.wait()
        finally:
            ranks.end()
            watch.stop()
            self._watch = None
            if any(sight.is_lost for sight in watch.ranks.values()):
                rendezvous.announce_failure()
            rendezvous.close()
            shutil.rmtree(attempt_dir, ignore_errors=True)
        exit_codes = {**dict.fromkeys(watch.ranks), **ranks.exit_codes()}
        return AttemptEnd(watch.ranks, exit_codes, watch.hung, watch.is_cut_short)

    def _start(self, ranks: _Ranks, attempt: Attempt, part: Assignment, attempt_dir: Path) -> None:
        surroundings = {
            SUPERVISOR_PID: identity_of_this_process(),
            ATTEMPT_DIR: str(attempt_dir),
            ATTEMPT: str(attempt.number),
            # NCCL then ends the communicators of a rank whose peer is gone, instead of waiting for it.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            **attempt.environment,
        }
        try:
            for local_rank in range(attempt.processes):
                if self._is_asked_to_stop:
                    return
                rank = part.first_rank + local_rank
                place = RankEnvironment(
                    rank, part.world_size, local_rank, attempt.processes, "paceline", part.store_host, part.store_port
                )
                listener = part.listener if rank == 0 else None
                ranks.start(
                    rank, (attempt.rank_main, attempt.arguments, {**surroundings, **rank_variables(place)}, listener)
                )
        finally:
            if part.listener is not None:
                part.listener.close()  # rank 0 has its own copy


def _mark(path: Path) -> None:
    with suppress(OSError):  # the attempt is over here, too
        path.touch()


class _Ranks:
    """The processes of this node's ranks."""

    def __init__(self) -> None:
        self._processes: dict[int, Any] = {}
        self._handles: list[ProcessHandle | None] = []

    def start(self, rank: int, arguments: tuple[Any, ...]) -> None:
        process = multiprocessing.get_context("forkserver").Process(target=_be_a_rank, args=arguments)
        process.start()
        assert process.pid is not None
        self._handles.append(find_forked(process.pid))
        self._processes[rank] = process

    def read_pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in dict(self._processes).items()}

    def wait(self) -> None:
        """Until all have ended. When one has, the watch sees to the others."""
        while running := [process.sentinel for process in self._processes.values() if process.exitcode is None]:
            connection.wait(running, HEAR_SIGNALS_S)

    def end(self) -> None:
        """None is left, whatever has happened."""
        for handle in self._handles:
            if handle is not None:
                handle.send(signal.SIGKILL)
        for process in self._processes.values():
            process.join()

    def exit_codes(self) -> dict[int, int | None]:
        return {rank: process.exitcode for rank, process in self._processes.items()}


def _be_a_rank(
    rank_main: RankMain, arguments: list[str], surroundings: dict[str, str], listener: socket.socket | None
) -> None:
    """In the new process. Rank 0 gets the socket at which the ranks' store listens: nobody else can take the port."""
    if listener is not None:
        surroundings = {**surroundings, STORE_FD: str(listener.detach())}
    rank_main(arguments, surroundings)


def _start_fork_server() -> None:
    """In the background: it loads torch while this process goes on.

    Stop signals reach every process of a terminal or of a job. This process handles them; the server starts with them
    blocked, and ignores them when it has loaded `paceline.launch.server`.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with safe_path():
        resource_tracker.ensure_running()  # by itself it would be started in there, and end the holding back
        with _held_back(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            forkserver.ensure_running()


def end_fork_server() -> None:
    """At once, with every rank it has forked: also those being born, which are in nobody's list yet."""
    server = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if server is None:
        return
    with suppress(ProcessLookupError, ChildProcessError):
        handle = ProcessHandle(server)
        handle.send(signal.SIGSTOP)
        os.waitpid(server, os.WUNTRACED)  # now it stands still, and forks no more while its children are counted
        for child in _children_of(server):
            with suppress(ProcessLookupError):
                ProcessHandle(child, parent=server).send(signal.SIGKILL)
        handle.send(signal.SIGKILL)


def _children_of(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # no /proc here: those in the list are ended all the same
        return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def interrupts_held_back() -> AbstractContextManager[None]:
    """Ctrl-C comes a moment later, at the end of this block."""
    return _held_back(signal.SIGINT)


@contextmanager
def _held_back(*numbers: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
