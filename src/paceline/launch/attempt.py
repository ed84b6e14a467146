"""One attempt: starts the ranks of this node, watches them and reports how they ended.

An attempt does not restart ranks, and the next attempt does not use anything of it. This process does not load torch.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import EXIT_INTERNAL
from paceline.launch.gang import Gang, GangMember, Plan
from paceline.launch.gang_messages import Hello, Outcome
from paceline.launch.rank_processes import FORKED_PRELOADS, LIBRARY_VARIABLES, THREADS, RankProcesses, start_fork_server
from paceline.launch.watch import RankState, Watch
from paceline.runs.machine import identity_of_this_process
from paceline.runtime.detect import ATTEMPT, Nodes, RankEnvironment, rank_variables
from paceline.runtime.peers import listen_on_all_addresses, listen_on_loopback
from paceline.runtime.pulse import ATTEMPT_DIR, PEERS_FAILED
from paceline.runtime.secret import read_secret, take_secret
from paceline.runtime.signals import SUPERVISOR_PID

_JOIN_TIMEOUT_S = 300.0
_HINT = "does a supervisor run on every node, do all of them reach that address, and is the secret the same?"
RankMain = Callable[[list[str]], None]  # gets the arguments of the command


# The rendezvous of the supervisors of one attempt: which ranks each node has, and where the ranks find their store.
#
# A single node has all ranks, and the store listens at loopback. Several nodes are a gang (`launch/gang.py`): each node
# says how many ranks it starts. The connections stay open during the attempt. If a node or its ranks fail, the other
# nodes do not wait for these ranks.


class StoppedWaiting(Exception):
    """A stop was requested before all nodes had arrived."""


@dataclass(frozen=True)
class Assignment:
    """This node's part of an attempt."""

    first_rank: int
    world_size: int
    store_host: str
    store_port: int
    listener: socket.socket | None = None  # of the store, on the node of rank 0


@dataclass
class Rendezvous:
    """Of one node, in one attempt."""

    nodes: Nodes
    attempt: int
    processes: int
    secret: bytes | None
    is_stopped: Callable[[], bool]
    on_failure: Callable[[], None]  # another node, or its ranks, have failed
    _gang: Gang | None = None

    def join(self) -> Assignment:
        if self.nodes.count == 1:
            listener = listen_on_loopback()
            host, port = listener.getsockname()[:2]
            return Assignment(0, self.processes, host, port, listener)
        listeners: list[socket.socket] = []

        def open_store(nodes: list[Hello]) -> Plan:
            listeners.append(listen_on_all_addresses(0))
            return listeners[0].getsockname()[1], {}

        self._gang = Gang(self._member(), self._check_outcome)
        try:
            start = self._gang.join(self.processes, open_store, self.is_stopped)
        finally:
            self._gang.close()
        if start is None:
            raise StoppedWaiting
        processes = [node.processes for node in start.nodes]
        host = "127.0.0.1" if listeners else self.nodes.host
        first_rank = sum(processes[: self.nodes.own])
        return Assignment(first_rank, sum(processes), host, start.port, *listeners)

    def announce_failure(self) -> None:
        if self._gang is not None:
            self._gang.report_end(EXIT_INTERNAL)

    def close(self) -> None:
        if self._gang is not None:
            self._gang.disconnect()

    def _member(self) -> GangMember:
        assert self.secret is not None
        return GangMember(
            node=self.nodes.own,
            nodes=self.nodes.count,
            host=self.nodes.host,
            ports=(self.nodes.port + self.attempt,),  # the port of the last attempt may not be free yet
            context=f"rendezvous {self.nodes.run_id} attempt {self.attempt}",
            timeout_s=_JOIN_TIMEOUT_S,
            hint=_HINT,
            secret=self.secret,
        )

    def _check_outcome(self, outcome: Outcome) -> None:
        if outcome.is_failure and outcome.node != self.nodes.own:
            self.on_failure()


@dataclass(frozen=True)
class Attempt:
    """What to start."""

    number: int
    processes: int
    rank_main: RankMain
    arguments: list[str]
    stacks_of: Callable[[int], Path]  # the file for the stacks of a rank
    nodes: Nodes
    environment: dict[str, str] = field(default_factory=dict)  # for its ranks
    can_save: bool = True  # a rank that is asked to stop saves first


@dataclass(frozen=True)
class AttemptEnd:
    """How the ranks of this node ended."""

    ranks: dict[int, RankState]
    exit_codes: dict[int, int | None]  # negative: the signal that ended the rank
    hung: list[int]
    is_cut_short: bool = False  # a stop has ended ranks that had not begun; the errors of the others follow from it

    @property
    def is_finished(self) -> bool:
        """Whether every rank has written that it is done. User code can exit with 0 before that."""
        is_done = {rank: state.is_done for rank, state in self.ranks.items()}
        return bool(self.exit_codes) and all(code == 0 and is_done[rank] for rank, code in self.exit_codes.items())


class Attempts:
    """Runs attempts, one at a time."""

    def __init__(self, threads: int) -> None:
        os.environ[THREADS] = str(threads)
        for name, value in LIBRARY_VARIABLES.items():
            os.environ.setdefault(name, value)
        self._taken = take_secret()  # before any process inherits the environment
        self._watch: Watch | None = None
        self._is_asked_to_stop = False
        start_fork_server(FORKED_PRELOADS)

    def stop_ranks(self, number: int) -> None:
        """Send a stop signal to the ranks of the current attempt. No more ranks are started."""
        self._is_asked_to_stop = True
        if self._watch is not None:
            self._watch.stop_all(number)

    def run(self, attempt: Attempt) -> AttemptEnd:
        secret = read_secret(self._taken) if attempt.nodes.count > 1 else None
        attempt_dir = Path(tempfile.mkdtemp(prefix="paceline-attempt-"))
        ranks = RankProcesses(can_save=attempt.can_save)
        self._watch = watch = Watch(attempt_dir, attempt.stacks_of, ranks.handles)
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
                ranks.wait()  # if one exits, the watch ends the others
        finally:
            ranks.end()
            watch.stop()
            self._watch = None
            if any(state.is_lost for state in watch.ranks.values()):
                rendezvous.announce_failure()
            rendezvous.close()
            shutil.rmtree(attempt_dir, ignore_errors=True)
        exit_codes = {**dict.fromkeys(watch.ranks), **ranks.exit_codes()}
        return AttemptEnd(watch.ranks, exit_codes, watch.hung, watch.is_cut_short)

    def _start(self, ranks: RankProcesses, attempt: Attempt, part: Assignment, attempt_dir: Path) -> None:
        shared = {
            SUPERVISOR_PID: identity_of_this_process(),
            ATTEMPT_DIR: str(attempt_dir),
            ATTEMPT: str(attempt.number),
            # NCCL then aborts the communicators of a rank whose peer has exited, instead of waiting for the peer.
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
                ranks.start(
                    rank,
                    attempt.rank_main,
                    attempt.arguments,
                    environment={**shared, **rank_variables(place)},
                    listener=part.listener if rank == 0 else None,
                )
        finally:
            if part.listener is not None:
                part.listener.close()  # rank 0 has its own copy


def _mark(path: Path) -> None:
    with suppress(OSError):  # the attempt has ended here, too, and its folder is removed
        path.touch()
