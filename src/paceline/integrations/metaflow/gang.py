"""The nodes of one step find each other, agree on a plan, and notice when one of them is gone. No torch, no Metaflow.

Metaflow tells every node where the main one is and how many there are. Each node calls the main one, which waits for
all, decides where to train and from which checkpoint, and tells everybody. The lines then stay open: whoever dies,
however it dies, the others hear of it at once, also while ranks are still being started.
"""

from __future__ import annotations

import hashlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError
from paceline.runtime.peers import (
    MalformedMessage,
    Message,
    Peer,
    PeerServer,
    connect,
    integer_in,
    listen_on_all_addresses,
    log_drop,
)

_FIRST_PORT, _PORTS, _CANDIDATES = 20_000, 20_000, 8
_ANSWER_S = 3.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Place:
    """This node among the others, in the words of Metaflow's `current.parallel`."""

    nodes: int
    own: int
    main_host: str
    name: str  # flow, run, step and attempt: nobody else's nodes answer to it
    secret: bytes = field(repr=False)

    @property
    def context(self) -> str:
        return f"metaflow {self.name}"

    @property
    def is_main(self) -> bool:
        return self.own == 0

    def ports(self) -> list[int]:
        """Where the main node may listen: the first of these that is free there."""
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4])
        return [_FIRST_PORT + (seed + 37 * number) % _PORTS for number in range(_CANDIDATES)]


class Line:
    """A connection to a node that has proved the run's secret."""

    def __init__(self, peer: Peer) -> None:
        self.address = peer.address
        self._peer = peer
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        peer.listen(self._messages.put, lambda: self._messages.put(None))

    def send(self, message: Message) -> None:
        self._peer.send(message)

    def receive(self, timeout_s: float | None) -> Message | None:
        """The next message; None when the other end is gone. Raises queue.Empty."""
        return self._messages.get(timeout=timeout_s)

    def close(self) -> None:
        """Nothing more is said here. The other end may still speak, so what was said arrives."""
        self._peer.end_sending()

    def drop(self) -> None:
        """Neither end speaks any more."""
        self._peer.close()


class Gang:
    """All nodes have met. Says which of them was lost, and passes on what one of them tells the others."""

    def __init__(self, place: Place, lines: dict[int, Line], layout: list[Message], plan: Message) -> None:
        self.place = place
        self.layout = layout  # what each node said of itself, in order
        self.plan = plan
        self.lost: str | None = None  # in words
        self.on_news: Callable[[Message], None] | None = None
        self._lines = lines
        self._followers = [
            threading.Thread(target=self._follow, args=item, name=f"node-{item[0]}", daemon=True)
            for item in lines.items()
        ]
        for follower in self._followers:
            follower.start()

    def tell(self, message: Message) -> None:
        for line in self._lines.values():
            line.send(message)

    def leave(self, code: int) -> None:
        self.tell({"bye": code})
        for line in self._lines.values():
            line.close()

    def wait_for_others(self, timeout_s: float) -> None:
        """Until they have left, too."""
        deadline = time.monotonic() + timeout_s
        for follower in self._followers:
            follower.join(max(0.0, deadline - time.monotonic()))

    def _follow(self, node: int, line: Line) -> None:
        while (message := line.receive(None)) is not None:
            if "bye" in message:
                try:
                    code = integer_in(message, "bye", -255, 255)
                except MalformedMessage as error:
                    log_drop(line.address, error.what)
                    continue
                if code != 0:
                    self._lose(f"node {node} ended with exit code {code}")
                return
            for other, onwards in self._lines.items():  # only the main node has a line to everybody
                if other != node:
                    onwards.send(message)
            if self.on_news is not None:
                self.on_news(message)
        self._lose(f"node {node} on {self.layout[node]['host']} is gone")

    def _lose(self, words: str) -> None:
        self.lost = self.lost or words


def meet(place: Place, about: Message, make_plan: Callable[[list[Message]], Message], timeout_s: float) -> Gang:
    """Wait until all nodes are there. The main one makes the plan, knowing what each node says of itself."""
    about = {**about, "node": place.own, "host": about.get("host", socket.gethostname())}
    if not place.is_main:
        line, answer = _call_main(place, about, timeout_s)
        return Gang(place, {0: line}, *read_answer(answer, place.nodes))
    lines, layout = _gather(place, about, timeout_s) if place.nodes > 1 else ({}, [about])
    try:
        plan = make_plan(layout)
    except BaseException:
        for line in lines.values():
            line.close()
        raise
    for line in lines.values():
        line.send({"layout": layout, "plan": plan})
    return Gang(place, lines, layout, plan)


def _gather(place: Place, about: Message, timeout_s: float) -> tuple[dict[int, Line], list[Message]]:
    deadline = time.monotonic() + timeout_s
    lines: dict[int, Line] = {}
    layout: dict[int, Message] = {place.own: about}
    arrivals: queue.SimpleQueue[tuple[Line, Message]] = queue.SimpleQueue()
    server = PeerServer(_listen(place), place.secret, place.context, lambda peer: _hear_hello(peer, place, arrivals))
    try:
        while len(layout) < place.nodes:
            for node, line in lines.items():
                if _is_gone(line):
                    raise PacelineError(f"node {node} went away before all nodes had arrived", got=layout[node]["host"])
            if time.monotonic() > deadline:
                missing = [str(node) for node in range(place.nodes) if node not in layout]
                raise PacelineError(
                    f"{len(missing)} of {place.nodes} nodes did not arrive within {timeout_s:.0f} s",
                    got=f"missing: node {', '.join(missing)}",
                    hint="look at their logs; --node-timeout gives slow ones longer",
                )
            with suppress(queue.Empty):
                line, hello = arrivals.get(timeout=_POLL_S)
                if hello["node"] in layout:
                    log_drop(line.address, f"node {hello['node']} is here already")
                    line.drop()
                    continue
                lines[hello["node"]], layout[hello["node"]] = line, hello
    except BaseException:
        for line in lines.values():
            line.close()
        raise
    finally:
        server.close()
    return lines, [layout[node] for node in range(place.nodes)]


def _hear_hello(peer: Peer, place: Place, arrivals: queue.SimpleQueue[tuple[Line, Message]]) -> None:
    """What a node says first, of itself."""
    line = Line(peer)
    with suppress(queue.Empty):
        try:
            hello = line.receive(_ANSWER_S)
            if hello is not None:
                arrivals.put((line, read_hello(hello, place.nodes)))
                return
        except MalformedMessage as error:
            log_drop(line.address, error.what)
    line.drop()


def read_hello(message: Message, nodes: int) -> Message:
    """What a node says of itself, checked. Raises MalformedMessage."""
    return _read_about(message, integer_in(message, "node", 1, nodes - 1))


def read_answer(message: Message, nodes: int) -> tuple[list[Message], Message]:
    """The layout and the plan, as the main node sends them, checked. Raises MalformedMessage."""
    layout, plan = message.get("layout"), message.get("plan")
    if not isinstance(layout, list) or len(layout) != nodes or not isinstance(plan, dict):
        raise MalformedMessage("the main node's answer is not a layout and a plan")
    return [_read_about(about, node) for node, about in enumerate(layout)], plan


def _read_about(about: Any, node: int) -> Message:
    if not isinstance(about, dict) or about.get("node") != node or not isinstance(about.get("host"), str):
        raise MalformedMessage(f"what is said of node {node} cannot be read")
    return about


def _is_gone(line: Line) -> bool:
    try:
        return line.receive(0) is None
    except queue.Empty:
        return False


def _listen(place: Place) -> socket.socket:
    for port in place.ports():
        with suppress(OSError):
            return listen_on_all_addresses(port)
    raise PacelineError("no port is free to meet the other nodes", got=", ".join(map(str, place.ports())))


def _call_main(place: Place, about: Message, timeout_s: float) -> tuple[Line, Message]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for port in place.ports():
            line = _try_port(place, about, port)
            if line is None:
                continue
            answer: Message | None = None
            with suppress(queue.Empty):
                answer = line.receive(max(_ANSWER_S, deadline - time.monotonic()))
            if answer is not None:
                return line, answer
            raise PacelineError("the main node went away before all nodes had arrived", got=place.main_host)
        time.sleep(_POLL_S)
    raise PacelineError(
        f"the main node did not answer within {timeout_s:.0f} s",
        got=place.main_host,
        hint="look at its log; --node-timeout gives slow ones longer",
    )


def _try_port(place: Place, about: Message, port: int) -> Line | None:
    """A line to the main node, if it is who listens there."""
    try:
        line = Line(connect(place.main_host, port, place.secret, place.context, _ANSWER_S))
    except OSError:
        return None
    line.send(about)
    return line


def free_port() -> int:
    """A port on this machine, in the range that clusters leave open, with the next one free too."""
    seed = time.monotonic_ns()
    for number in range(200):
        port = _FIRST_PORT + (seed + 101 * number) % (_PORTS - 1)
        with suppress(OSError), socket.create_server(("", port)), socket.create_server(("", port + 1)):
            return port
    raise PacelineError("no port is free on the main node")
