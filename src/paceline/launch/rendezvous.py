"""The rendezvous of the supervisors of one attempt: which ranks each node has, and where the ranks find their store.

A single node has all ranks, and the store listens at loopback. Several nodes are a gang (`launch/gang.py`): each node
says how many ranks it starts. The connections stay open during the attempt. If a node or its ranks fail, the other
nodes do not wait for these ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import EXIT_INTERNAL
from paceline.launch.gang import Gang, Member, Plan
from paceline.launch.gang_messages import Hello, Outcome
from paceline.runtime.detect import Nodes
from paceline.runtime.peers import listen_on_all_addresses, listen_on_loopback

_JOIN_TIMEOUT_S = 300.0
_HINT = "does a supervisor run on every node, do all of them reach that address, and is the secret the same?"


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
            start = self._gang.meet(self.processes, open_store, self.is_stopped)
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

    def _member(self) -> Member:
        assert self.secret is not None
        return Member(
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
