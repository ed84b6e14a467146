"""The pods of a job as one gang: each one's place, what they say to each other, and how all of them go on.

Pure but for `Line`, a connection between two pods; `kubernetes_pod.py` is the life of a pod.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

from paceline.errors import EXIT_FINISHED, EXIT_PREEMPTED, PacelineError, UserError
from paceline.launch.policy import FINAL_CODES

NODES, NODE, MEET = "PACELINE_NODES", "PACELINE_NODE", "PACELINE_MEET"
START_TIMEOUT = "PACELINE_START_TIMEOUT_S"
_START_TIMEOUT_S = 900.0
_LONGEST_WORDS = 4096
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a silent node is lost after half a minute
_STOPPED = (EXIT_PREEMPTED, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Place:
    """This pod's place among its peers."""

    nodes: int
    node: int
    host: str  # where node 0 is found
    port: int
    start_timeout_s: float

    @property
    def leads(self) -> bool:
        return self.node == 0


def read_place(environment: Mapping[str, str] = os.environ) -> Place:
    host, _, port = environment.get(MEET, "").rpartition(":")
    try:
        place = Place(
            nodes=int(environment[NODES]),
            node=int(environment[NODE]),
            host=host,
            port=int(port),
            start_timeout_s=float(environment.get(START_TIMEOUT, _START_TIMEOUT_S)),
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
        if code != EXIT_FINISHED and code not in _STOPPED:
            return Verdict("fail", code, node)  # the first is the likely cause; a new pod may land on a better node
    if len(codes) < nodes:
        return None  # a stop is everybody's, and others may still be saving
    if set(codes.values()) == {EXIT_FINISHED}:
        return Verdict("end")
    return Verdict("again")


# --- Connections ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """Something that happened, to be dealt with in turn."""

    kind: Literal["word", "lost", "child", "signal"]
    line: Line | None = None
    content: Any = None


Events = SimpleQueue[Event]


class Line:
    """A connection between two pods: words are JSON, one to a line. Its end is an event, too."""

    def __init__(self, connection: socket.socket, events: Events) -> None:
        self.node = -1  # who is at the other end; known after its hello
        self.is_open = True
        self._connection = connection
        self._events = events
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, **words: Any) -> None:
        with suppress(OSError):  # the listener notices, and says so
            self._connection.sendall((json.dumps(words) + "\n").encode())

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self._connection.makefile("rb") as file:
            while text := file.readline(_LONGEST_WORDS):
                words = json.loads(text)
                if not isinstance(words, dict):
                    break  # a stranger, as is one whose words are no JSON
                self._events.put(Event("word", self, words))
        self.is_open = False
        self.close()
        self._events.put(Event("lost", self))


def listen_at(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise PacelineError(f"port {port} cannot be opened in this pod", got=error.strerror) from error
