"""Plain TCP connections from every rank to every other, before torch opens its own. Imports no torch.

A rank listens on a port that the system chooses, as gloo and NCCL do. A client asks several times for the server's
clock, and sends a message as large as gradients, which the server counts. This finds networks that lose only large
packets.
"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

_TIMEOUT_S = 4.0
_QUESTIONS = 5
_LARGE_BYTES = 512 * 1024
_REQUEST = struct.Struct("!I")  # bytes that follow
_ANSWER = struct.Struct("!dI")  # the host's clock, bytes that arrived
_MOST_AT_ONCE = 32


@dataclass(frozen=True)
class Visit:
    """The result of one rank's connection to another."""

    error: str = ""
    clock_ahead_s: float = 0.0  # the server's clock minus ours
    round_trip_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Door(socketserver.BaseRequestHandler):
    clock: Callable[[], float]

    def handle(self) -> None:
        self.request.settimeout(_TIMEOUT_S)
        try:
            while True:
                size = _REQUEST.unpack(_receive(self.request, _REQUEST.size))[0]
                arrived = len(_receive(self.request, size))
                self.request.sendall(_ANSWER.pack(self.clock(), arrived))
        except OSError:  # the client has disconnected, or sent nothing
            return


class Listener:
    """Answers connections while the `with` block runs."""

    def __init__(self, clock: Callable[[], float], host: str = "") -> None:
        door = type("Door", (_Door,), {"clock": staticmethod(clock)})
        self._server = socketserver.ThreadingTCPServer((host, 0), door)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Listener:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="door", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def visit_all(places: Sequence[tuple[str, int]], clock: Callable[[], float]) -> list[Visit]:
    """Connect to all in parallel: hosts that drop packets cost one timeout in total."""
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        return list(pool.map(lambda place: visit(place, clock), places))


def visit(place: tuple[str, int], clock: Callable[[], float] = time.time) -> Visit:
    try:
        with socket.create_connection(place, timeout=_TIMEOUT_S) as peer:
            questions = [_ask(peer, 0, clock) for _ in range(_QUESTIONS)]
            try:
                _ask(peer, _LARGE_BYTES, clock)
            except OSError as error:
                return Visit(f"small messages arrive, large ones do not ({error})")
    except OSError as error:
        return Visit(error.strerror or str(error) or type(error).__name__)
    return min(questions, key=lambda answer: answer.round_trip_s)


def _ask(peer: socket.socket, size: int, clock: Callable[[], float]) -> Visit:
    asked_at, started = clock(), time.perf_counter()
    peer.sendall(_REQUEST.pack(size) + bytes(size))
    theirs, arrived = _ANSWER.unpack(_receive(peer, _ANSWER.size))
    round_trip = time.perf_counter() - started
    if arrived != size:
        raise OSError(f"{arrived} of {size} bytes arrived")
    return Visit(clock_ahead_s=theirs - (asked_at + round_trip / 2), round_trip_s=round_trip)


def _receive(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(size - len(data), 1 << 16))
        if not part:
            raise OSError("the other side closed the connection")
        data += part
    return bytes(data)
