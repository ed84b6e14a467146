"""The supervisors of one attempt meet: which ranks each node has, and where the ranks find their store.

Alone, a node has all ranks, and the store listens at loopback. On several nodes node 0 listens at an address that all
of them know. Each node proves the run's secret there and says how many ranks it starts; node 0 waits for all and
answers with the assignment. The connections stay open for the length of the attempt: a node whose ranks have failed
says so, and the others stop waiting for them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from paceline.errors import Cause, PacelineError
from paceline.runtime.detect import Nodes
from paceline.runtime.peers import (
    MalformedMessage,
    Message,
    Peer,
    PeerServer,
    connect,
    integer_in,
    listen_on_all_addresses,
    listen_on_loopback,
    log_drop,
)

_JOIN_TIMEOUT_S = 300.0
_LOOK_S = 0.1
_MOST_RANKS = 1 << 20
_FAILED: Message = {"failed": True}


class StoppedWaiting(Exception):
    """A stop was asked for before all nodes had met."""


@dataclass(frozen=True)
class Assignment:
    """This node's part of an attempt."""

    first_rank: int
    world_size: int
    store_host: str
    store_port: int
    listener: socket.socket | None = None  # of the store: rank 0's, on the node that has it


@dataclass(frozen=True)
class Request:
    """What a node brings to the meeting."""

    nodes: Nodes
    attempt: int
    processes: int
    secret: bytes | None
    is_stopped: Callable[[], bool]
    on_failure: Callable[[], None]  # another node's ranks have failed

    @property
    def port(self) -> int:
        """A new one for each attempt, since the last may not be free yet."""
        return self.nodes.port + self.attempt

    @property
    def context(self) -> str:
        return f"rendezvous {self.nodes.run_id} attempt {self.attempt}"


class Meeting(Protocol):
    """The nodes of one attempt."""

    def join(self) -> Assignment: ...

    def announce_failure(self) -> None: ...

    def close(self) -> None: ...


def open_meeting(request: Request) -> Meeting:
    if request.nodes.count == 1:
        return _Alone(request)
    assert request.secret is not None
    return _Leader(request, request.secret) if request.nodes.own == 0 else _Follower(request, request.secret)


class _Alone:
    def __init__(self, request: Request) -> None:
        self._processes = request.processes

    def join(self) -> Assignment:
        listener = listen_on_loopback()
        host, port = listener.getsockname()[:2]
        return Assignment(0, self._processes, host, port, listener)

    def announce_failure(self) -> None:
        return

    def close(self) -> None:
        return


class _Leader:
    """Node 0."""

    def __init__(self, request: Request, secret: bytes) -> None:
        self._request, self._secret = request, secret
        self._peers: dict[int, Peer] = {}
        self._processes: dict[int, int] = {0: request.processes}
        self._events: SimpleQueue[tuple[Peer, Message | None]] = SimpleQueue()

    def join(self) -> Assignment:
        request = self._request
        try:
            server = PeerServer(listen_on_all_addresses(request.port), self._secret, request.context, self._admit)
        except OSError as error:
            raise PacelineError(
                f"port {request.port} cannot be opened on node 0",
                where=request.nodes.host,
                got=error.strerror,
                cause=Cause.RENDEZVOUS,
            ) from error
        try:
            self._gather()
        finally:
            server.close()
        listener = listen_on_all_addresses(0)
        port = listener.getsockname()[1]
        world_size = sum(self._processes.values())
        first = self._processes[0]
        for node in range(1, request.nodes.count):
            self._peers[node].send({"first_rank": first, "world_size": world_size, "store_port": port})
            first += self._processes[node]
        return Assignment(0, world_size, "127.0.0.1", port, listener)

    def _gather(self) -> None:
        deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
        nodes = self._request.nodes
        while len(self._processes) < nodes.count:
            if self._request.is_stopped():
                raise StoppedWaiting
            if time.monotonic() > deadline_s:
                missing = [str(node) for node in range(nodes.count) if node not in self._processes]
                raise _not_met(self._request, f"missing: node {', '.join(missing)}")
            with suppress(Empty):
                self._hear(*self._events.get(timeout=_LOOK_S))

    def _hear(self, peer: Peer, message: Message | None) -> None:
        """Before all are here: a node arrives, or is gone again."""
        known = next((node for node, other in self._peers.items() if other is peer), None)
        if message is None and known is not None:
            del self._peers[known], self._processes[known]
        elif message is not None:
            try:
                node = integer_in(message, "node", 1, self._request.nodes.count - 1)
                processes = integer_in(message, "processes", 1, _MOST_RANKS)
            except MalformedMessage as error:
                log_drop(peer.address, error.what)
                peer.close()
                return
            if node in self._peers and self._peers[node] is not peer:
                log_drop(self._peers[node].address, f"node {node} has called again, from {peer.address}")
                self._peers[node].close()
            self._peers[node], self._processes[node] = peer, processes

    def _admit(self, peer: Peer) -> None:
        def receive(message: Message) -> None:
            if message == _FAILED:
                self._relay(peer)
            else:
                self._events.put((peer, message))

        peer.listen(receive, lambda: self._events.put((peer, None)))

    def _relay(self, source: Peer) -> None:
        if source not in self._peers.values():
            return
        for peer in self._peers.values():
            if peer is not source:
                peer.send(_FAILED)
        self._request.on_failure()

    def announce_failure(self) -> None:
        for peer in self._peers.values():
            peer.send(_FAILED)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.end_sending()  # what was said arrives


class _Follower:
    """Every other node."""

    def __init__(self, request: Request, secret: bytes) -> None:
        self._request, self._secret = request, secret
        self._peer: Peer | None = None

    def join(self) -> Assignment:
        request = self._request
        deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
        trouble = "node 0 went away before all nodes had arrived"
        while time.monotonic() < deadline_s:
            if request.is_stopped():
                raise StoppedWaiting
            try:
                peer = connect(request.nodes.host, request.port, self._secret, request.context)
            except OSError as error:  # it may not listen yet, or its name may not be known yet
                trouble = str(error)
                time.sleep(_LOOK_S)
                continue
            assignment = self._wait_for_assignment(peer, deadline_s)
            if assignment is not None:
                self._peer = peer
                return assignment
            peer.close()
        raise _not_met(request, trouble)

    def _wait_for_assignment(self, peer: Peer, deadline_s: float) -> Assignment | None:
        request = self._request
        answers: SimpleQueue[Message | None] = SimpleQueue()

        def receive(message: Message) -> None:
            if message == _FAILED:
                request.on_failure()
            else:
                answers.put(message)

        peer.listen(receive, lambda: answers.put(None))
        peer.send({"node": request.nodes.own, "processes": request.processes})
        while time.monotonic() < deadline_s:
            if request.is_stopped():
                peer.close()
                raise StoppedWaiting
            with suppress(Empty):
                message = answers.get(timeout=_LOOK_S)
                if message is None:
                    return None
                return _read_assignment(message, request)
        return None

    def announce_failure(self) -> None:
        if self._peer is not None:
            self._peer.send(_FAILED)

    def close(self) -> None:
        if self._peer is not None:
            self._peer.end_sending()


def _read_assignment(message: Message, request: Request) -> Assignment:
    world_size = integer_in(message, "world_size", request.nodes.count, _MOST_RANKS)
    first = integer_in(message, "first_rank", 1, world_size - request.processes)
    return Assignment(first, world_size, request.nodes.host, integer_in(message, "store_port", 1, 65535))


def _not_met(request: Request, got: str) -> PacelineError:
    return PacelineError(
        f"the supervisors of {request.nodes.count} nodes did not meet within {_JOIN_TIMEOUT_S:.0f} s",
        where=f"{request.nodes.host}:{request.port}",
        got=got,
        hint="does a supervisor run on every node, do all of them reach that address, and is the secret the same?",
        cause=Cause.RENDEZVOUS,
    )
