"""The pods of a job as one gang: each one's place, what they say to each other, and how all of them go on.

Pure but for `Line`, a connection between two pods; `kubernetes_pod.py` is the life of a pod.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

from paceline.errors import EXIT_FINISHED, EXIT_PREEMPTED, PacelineError, UserError, printable
from paceline.launch.policy import FINAL_CODES
from paceline.runtime.peers import MalformedMessage, Message, Peer, integer_in, listen_on_all_addresses
from paceline.runtime.secret import read_secret
from paceline.settings.variables import START_TIMEOUT, read_number

NODES, NODE, MEET = "PACELINE_NODES", "PACELINE_NODE", "PACELINE_MEET"
_START_TIMEOUT_S = 900.0
_STOPPED = (EXIT_PREEMPTED, 128 + signal.SIGTERM)
_LONGEST_WORDS = 4000


@dataclass(frozen=True)
class Place:
    """This pod's place among its peers."""

    nodes: int
    node: int
    host: str  # where node 0 is found
    port: int
    start_timeout_s: float
    secret: bytes = field(repr=False)

    @property
    def leads(self) -> bool:
        return self.node == 0


def read_place(environment: Mapping[str, str] = os.environ) -> Place:
    secret = read_secret(environment)
    host, _, port = environment.get(MEET, "").rpartition(":")
    try:
        place = Place(
            nodes=int(environment[NODES]),
            node=int(environment[NODE]),
            host=host,
            port=int(port),
            start_timeout_s=read_number(START_TIMEOUT, _START_TIMEOUT_S, environment),
            secret=secret,
        )
        if not (host and 0 <= place.node < place.nodes):
            raise ValueError(f"node {place.node} of {place.nodes}, meeting at {environment[MEET]!r}")
    except (KeyError, ValueError) as error:
        raise UserError(
            "a pod does not know its place among the others",
            where=f"{NODES}, {NODE}, {MEET}",
            got=f"{type(error).__name__}: {error}",
            hint="paceline submit kubernetes writes them into the manifest",
        ) from error
    return place


@dataclass(frozen=True)
class Verdict:
    """How all pods go on: end with this code; the pod that failed first ends, the others again; all again."""

    do: str  # "end", "fail" or "again"
    code: int = EXIT_FINISHED
    node: int = -1


def judge(codes: Mapping[int, int], nodes: int) -> Verdict | None:
    """What follows from how pods have ended so far, in the order in which they did. None: wait for the rest."""
    for code in codes.values():
        if code in FINAL_CODES:
            return Verdict("end", code)
    for node, code in codes.items():
        if is_failure(code):
            return Verdict("fail", code, node)  # the first is the likely cause; a new pod may land on a better node
    if len(codes) < nodes:
        return None  # a stop is everybody's, and others may still be saving
    if set(codes.values()) == {EXIT_FINISHED}:
        return Verdict("end")
    return Verdict("again")


def is_failure(code: int) -> bool:
    return code != EXIT_FINISHED and code not in _STOPPED


# --- Messages ---------------------------------------------------------------------------------------------------------
# Each raises MalformedMessage.


def read_hello(message: Message, nodes: int) -> int:
    """The first words of a follower: which node it is."""
    return integer_in(message, "hello", 1, nodes - 1)


def read_go(message: Message) -> int:
    """The leader's answer when all are there: the first of the ports at which the supervisors meet."""
    return integer_in(message, "go", 1, 65_000)


def read_ended(message: Message) -> int:
    """How a follower's training has ended."""
    return integer_in(message, "ended", 0, 255)


def read_last_words(message: Message) -> str:
    """What a follower's training said last, if it failed."""
    words = message.get("words", "")
    if not isinstance(words, str):
        raise MalformedMessage("'words' of a message is not text")
    return printable(words[-_LONGEST_WORDS:])


def read_verdict(message: Message, nodes: int) -> Verdict:
    """How all go on, in the words of the leader."""
    do = message.get("do")
    if do not in ("end", "fail", "again"):
        raise MalformedMessage("'do' of a message is not one of end, fail, again")
    return Verdict(do, integer_in(message, "code", 0, 255), integer_in(message, "node", -1, nodes - 1))


# --- Connections ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """Something that happened, to be dealt with in turn."""

    kind: Literal["word", "lost", "child", "signal"]
    line: Line | None = None
    content: Any = None


Events = SimpleQueue[Event]


class Line:
    """A connection to a pod that has proved the run's secret. Its messages and its end are events."""

    def __init__(self, peer: Peer, events: Events) -> None:
        self.node = -1  # who is at the other end; known after its hello
        self.is_open = True
        self.address = peer.address
        self._peer = peer
        self._events = events
        peer.listen(lambda message: events.put(Event("word", self, message)), self._end)

    def say(self, **words: Any) -> None:
        self._peer.send(words)

    def close(self) -> None:
        self._peer.close()

    def _end(self) -> None:
        self.is_open = False
        self.close()
        self._events.put(Event("lost", self))


def listen_at(port: int) -> socket.socket:
    try:
        return listen_on_all_addresses(port)
    except OSError as error:
        raise PacelineError(f"port {port} cannot be opened in this pod", got=error.strerror) from error
