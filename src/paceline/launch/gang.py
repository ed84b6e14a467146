"""A gang: nodes that start together, and end or restart together. Used on Kubernetes, in Metaflow, and by supervisors.

Node 0 is the leader and listens. All other nodes connect to it and prove the run's secret (`runtime/peers.py`). The
connections stay open, so a node that dies is noticed at once; TCP keepalive finds a machine that is silent for half a
minute. The leader collects exit codes and lost nodes, and sends the outcome to all nodes.

    start = gang.join(processes=0, make_plan=...)    # barrier: returns when all nodes are connected
    gang.report_end(code)
    outcome = gang.wait_for_outcome()
    gang.disconnect()                                # and join again, if the outcome is a restart
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from weakref import WeakSet

from paceline.errors import EXIT_FINISHED, Cause, PacelineError
from paceline.launch.gang_messages import (
    LONGEST_TEXT,
    Ended,
    GangMessage,
    Hello,
    Outcome,
    Start,
    Upload,
    decide,
    decode,
    encode,
)
from paceline.runtime.peers import (
    MalformedMessage,
    Message,
    Peer,
    PeerServer,
    connect,
    listen_on_all_addresses,
    log_drop,
)
from paceline.runtime.resources import usable_cores
from paceline.runtime.signals import SIGNAL_WAIT_S

_CONNECT_TIMEOUT_S = 3.0
_RETRY_S = 0.1
FIRST_PORT, PORTS = 20_000, 20_000  # below the range from which a system assigns ports by itself
_PORTS_OF_JOB = 64

Plan = tuple[int, dict[str, Any]]  # port and plan of `Start`
MakePlan = Callable[[list[Hello]], Plan]


@dataclass(frozen=True)
class GangMember:
    """This node in its gang."""

    node: int
    nodes: int
    host: str  # of the leader
    ports: tuple[int, ...]  # the leader listens at the first one that is free
    context: str  # a connection of another gang with the same secret is refused
    timeout_s: float  # to wait for all nodes
    hint: str  # what to try if they do not come
    secret: bytes = field(repr=False)
    lost_nodes_return: bool = True  # while the gang meets: wait for a lost node to connect again

    @property
    def is_leader(self) -> bool:
        return self.node == 0


class Gang:
    """The connections of this node. Threads read them and change the state; methods wait for a change."""

    def __init__(self, member: GangMember, on_outcome: Callable[[Outcome], None] = lambda outcome: None) -> None:
        self.member = member
        self.uploads: SimpleQueue[Upload] = SimpleQueue()  # announced by the leader
        self.outcome: Outcome | None = None  # of the current attempt
        self.errors: dict[int, str] = {}  # on the leader: what failed nodes have sent of their standard error
        self._on_outcome = on_outcome
        self._start: Start | None = None
        self._codes: dict[int, int] = {}  # on the leader, in the order in which nodes ended
        self._arrived: dict[int, tuple[Peer, Hello]] = {}  # on the leader: nodes for the next attempt
        self._peers: dict[int, Peer] = {}  # of this attempt: all other nodes, or the leader
        self._known: WeakSet[Peer] = WeakSet()  # the leader, or peers that have sent `Hello`
        self._hosts: dict[int, str] = {}  # on the leader
        self._lost_early: int | None = None
        self._changed = threading.Condition(threading.RLock())
        self._server = self._listen() if member.is_leader and member.nodes > 1 else None

    # --- Barrier: an attempt starts

    def join(
        self,
        processes: int = 0,
        make_plan: MakePlan = lambda nodes: (0, {}),
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Start | None:
        """Wait until all nodes are connected. None: a stop was requested. The leader makes the plan."""
        own = Hello(self.member.node, socket.gethostname(), _machine(), usable_cores(), processes)
        with self._changed:
            self._start, self.outcome = None, None
            self._codes.clear()
            self.errors.clear()
        return self._gather(own, make_plan, is_stopped) if self.member.is_leader else self._join(own, is_stopped)

    def _gather(self, own: Hello, make_plan: MakePlan, is_stopped: Callable[[], bool]) -> Start | None:
        deadline_s = time.monotonic() + self.member.timeout_s
        with self._changed:
            while len(self._arrived) < self.member.nodes - 1:
                if is_stopped():
                    return None
                self._require_none_lost()
                if time.monotonic() > deadline_s:
                    raise self._incomplete()
                self._changed.wait(_RETRY_S)
            nodes = [own, *(hello for _, (_, hello) in sorted(self._arrived.items()))]
            self._peers = {node: peer for node, (peer, _) in self._arrived.items()}
            self._arrived = {}
        try:
            port, plan = make_plan(nodes)
            with self._changed:
                self._require_none_lost()
                self._start = Start(tuple(nodes), port, plan)
                self._broadcast(self._start)
                if self.outcome is not None:  # a node was lost meanwhile
                    self._broadcast(self.outcome)
        except BaseException:
            self.disconnect()
            raise
        return self._start

    def _join(self, own: Hello, is_stopped: Callable[[], bool]) -> Start | None:
        deadline_s = time.monotonic() + self.member.timeout_s
        reason = "not all nodes have arrived"
        while time.monotonic() < deadline_s:
            for port in self.member.ports:
                if is_stopped():
                    return None
                try:
                    peer = connect(self.member.host, port, self.member.secret, self.member.context, _CONNECT_TIMEOUT_S)
                except OSError as error:  # it does not listen yet, or its name is not known yet
                    reason = str(error)
                    continue
                self._peers = {0: peer}
                self._known.add(peer)
                self._listen_to(peer, self._receive_from_leader)
                peer.send(encode(own))
                start = self._wait_for_start(deadline_s, is_stopped)
                if start is not None or is_stopped():
                    return start
                if not self._peers and not self.member.lost_nodes_return:
                    raise PacelineError(
                        "node 0 went away before all nodes had arrived",
                        where=self.member.host,
                        cause=Cause.RENDEZVOUS,
                    )
                reason = "not all nodes have arrived"
                peer.close()
            time.sleep(_RETRY_S)
        raise PacelineError(
            f"node 0 did not start the job within {self.member.timeout_s:.0f} s",
            where=self._address,
            got=reason,
            hint=self.member.hint,
            cause=Cause.RENDEZVOUS,
        )

    def _wait_for_start(self, deadline_s: float, is_stopped: Callable[[], bool]) -> Start | None:
        """None: stopped, too late, or the leader is lost."""
        with self._changed:
            while self._start is None and self._peers and not is_stopped() and time.monotonic() < deadline_s:
                self._changed.wait(_RETRY_S)
            return self._start

    def _require_none_lost(self) -> None:
        lost, self._lost_early = self._lost_early, None
        if lost is not None and not self.member.lost_nodes_return:
            raise PacelineError(
                f"node {lost} went away before all nodes had arrived", got=self._hosts.get(lost), cause=Cause.RENDEZVOUS
            )

    def _incomplete(self) -> PacelineError:
        missing = [str(node) for node in range(1, self.member.nodes) if node not in self._arrived]
        return PacelineError(
            f"{len(missing)} of {self.member.nodes} nodes did not arrive within {self.member.timeout_s:.0f} s",
            where=self._address,
            got=f"missing: node {', '.join(missing)}",
            hint=self.member.hint,
            cause=Cause.RENDEZVOUS,
        )

    @property
    def _address(self) -> str:
        return f"{self.member.host}:{self.member.ports[0]}"

    # --- During an attempt

    def send_upload(self, upload: Upload) -> None:
        """As the leader, to all other nodes."""
        self._broadcast(upload)

    def report_end(self, code: int, error: str = "") -> None:
        """The command of this node has ended."""
        ended = Ended(code, error[-LONGEST_TEXT:])
        with self._changed:
            if self.member.is_leader:
                self._record_end(self.member.node, ended)
            elif self.outcome is None:
                self._broadcast(ended)

    def wait_for_outcome(self) -> Outcome:
        with self._changed:
            while self.outcome is None:
                self._changed.wait(SIGNAL_WAIT_S)
            return self.outcome

    def wait_for_disconnect(self, timeout_s: float, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Until the other ends of all connections are closed."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._peers and not is_stopped() and time.monotonic() < deadline_s:
                self._changed.wait(_RETRY_S)

    def disconnect(self, timeout_s: float = 0.0) -> None:
        """End the attempt and wait this long for the other ends. What was sent arrives.

        Nodes that have connected for the next attempt stay connected.
        """
        with self._changed:
            for peer in self._peers.values():
                peer.end_sending()
            self.wait_for_disconnect(timeout_s)
            self._peers = {}

    def close(self) -> None:
        """Stop listening. The connections of this attempt stay open."""
        if self._server is not None:
            self._server.close()
        with self._changed:
            for peer, _ in self._arrived.values():
                peer.close()

    # --- Messages, in the threads that read

    def _listen(self) -> PeerServer:
        for port in self.member.ports:
            try:
                listener = listen_on_all_addresses(port)
            except OSError as error:
                reason = error.strerror
                continue
            return PeerServer(
                listener,
                self.member.secret,
                self.member.context,
                lambda peer: self._listen_to(peer, self._receive_from_node),
            )
        raise PacelineError(
            "no port can be opened for the other nodes",
            where=", ".join(map(str, self.member.ports)),
            got=reason,
            cause=Cause.RENDEZVOUS,
        )

    def _listen_to(self, peer: Peer, receive: Callable[[Peer, GangMessage], None]) -> None:
        def read(message: Message) -> None:
            try:
                with self._changed:
                    receive(peer, decode(message))
                    self._changed.notify_all()
            except MalformedMessage as error:
                log_drop(peer.address, error.what)
                if peer not in self._known:
                    peer.close()

        peer.listen(read, partial(self._lose, peer))

    def _receive_from_node(self, peer: Peer, message: GangMessage) -> None:
        if isinstance(message, Ended) and peer in self._known:
            for node in [node for node, other in self._peers.items() if other is peer]:  # not of an earlier attempt
                self._record_end(node, message)
        elif isinstance(message, Hello) and peer not in self._known and 0 < message.node < self.member.nodes:
            self._known.add(peer)
            before = self._arrived.pop(message.node, None)
            if before is not None:
                log_drop(before[0].address, f"node {message.node} has connected again, from {peer.address}")
                before[0].close()
            if message.node in self._peers:  # it was replaced, and its old connection is not closed yet
                self._record_loss(message.node)
            self._arrived[message.node] = (peer, message)
            self._hosts[message.node] = message.host
        else:
            raise MalformedMessage(f"{type(message).__name__} of a node is not expected here")

    def _receive_from_leader(self, peer: Peer, message: GangMessage) -> None:
        if self._peers.get(0) is not peer:
            return  # of an earlier attempt
        if isinstance(message, Start) and [hello.node for hello in message.nodes] == [*range(self.member.nodes)]:
            self._start = self._start or message
        elif isinstance(message, Upload):
            self.uploads.put(message)
        elif isinstance(message, Outcome) and self._start is not None:
            self._set_outcome(message)
        else:
            raise MalformedMessage(f"{type(message).__name__} of the leader is not expected here")

    def _record_end(self, node: int, ended: Ended) -> None:
        if node in self._codes:
            return
        self._codes[node] = ended.code
        if ended.error and node != self.member.node:
            self.errors[node] = ended.error
        outcome = decide(self._codes, self.member.nodes)
        if outcome is not None:
            self._set_outcome(outcome)

    def _lose(self, peer: Peer) -> None:
        """The other end of a connection is closed."""
        peer.end_sending()
        with self._changed:
            for node in [node for node, (other, _) in self._arrived.items() if other is peer]:
                del self._arrived[node]
                self._lost_early = node
            for node in [node for node, other in self._peers.items() if other is peer]:
                del self._peers[node]
                if self._start is None:
                    self._lost_early = node
                if self._start is not None or self.member.is_leader:
                    self._record_loss(node)
            self._changed.notify_all()

    def _record_loss(self, node: int) -> None:
        host = self._hosts.get(node) or self.member.host
        self._set_outcome(Outcome("restart", EXIT_FINISHED, node, f"node {node} on {host} is lost"))

    def _set_outcome(self, outcome: Outcome) -> None:
        """Once per attempt."""
        if self.outcome is not None:
            return
        self.outcome = outcome
        if self.member.is_leader and self._start is not None:
            self._broadcast(outcome)
        self._changed.notify_all()
        self._on_outcome(outcome)

    def _broadcast(self, message: GangMessage) -> None:
        for peer in list(self._peers.values()):
            peer.send(encode(message))


def free_port() -> int:
    """A port of this machine for the supervisors. They use the next one for each restart."""
    for _ in range(200):
        first = FIRST_PORT + _PORTS_OF_JOB * random.randrange(PORTS // _PORTS_OF_JOB)
        with suppress(OSError):
            for port in range(first, first + 8):
                socket.create_server(("", port)).close()
            return first
    raise PacelineError("no port is free on node 0", where=f"{FIRST_PORT} to {FIRST_PORT + PORTS}")


def _machine() -> str:
    """Containers on one machine have their own host names, and their own cores."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + socket.gethostname()
    return socket.gethostname()
