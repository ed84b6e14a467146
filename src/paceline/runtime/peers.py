"""Connections between the nodes of a run. Both ends have proved that they know the run's secret. Imports no torch.

Messages are JSON objects of bounded length, never pickles. Each has an HMAC, which detects messages that were added,
changed or repeated. Connections without the secret are closed and logged. They do not delay other connections.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.errors import PacelineError
from paceline.runtime.secret import SessionKeys, prove_as_client, prove_as_server, receive_exactly

Message = dict[str, Any]
PROOF_TIMEOUT_S = 5.0
_LONGEST_MESSAGE = 1 << 20  # bytes; the layout of a thousand nodes takes a fifth of it
_MOST_UNPROVED = 64
_HEADER = struct.Struct("!I32s")  # length of the text, HMAC
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a silent node is lost after half a minute
_SEND_TIMEOUT_S = 30.0


class MalformedMessage(PacelineError):
    """A message that no version of Paceline sends."""


class Peer:
    """One end of a connection to a process that knows the secret."""

    def __init__(self, connection: socket.socket, keys: SessionKeys, address: str) -> None:
        self.address = address
        self._connection, self._keys = connection, keys
        self._sent = self._received = 0
        self._lock = threading.Lock()  # two threads may send
        self._open_ends = 2  # the connection is closed when neither end sends any more
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        timeout = struct.pack("ll", int(_SEND_TIMEOUT_S), 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)  # a peer that reads nothing is lost
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message) -> None:
        """Send a message. A broken connection is not an error here: the receiving thread detects it."""
        text = json.dumps(message).encode()
        with self._lock:
            try:
                self._connection.sendall(_HEADER.pack(len(text), _sign(self._keys.send, self._sent, text)) + text)
            except OSError:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)  # a partial message may be sent: no other can follow
            self._sent += 1

    def receive(self) -> Message | None:
        """The next message. None if the other end has closed. Raises MalformedMessage."""
        try:
            length, signature = _HEADER.unpack(receive_exactly(self._connection, _HEADER.size, None))
            if length > _LONGEST_MESSAGE:
                raise MalformedMessage("a message is too long", where=self.address, got=f"{length} bytes")
            text = receive_exactly(self._connection, length, None)
        except OSError:
            return None
        if not hmac.compare_digest(signature, _sign(self._keys.receive, self._received, text)):
            raise MalformedMessage("the HMAC of a message is wrong", where=self.address)
        self._received += 1
        return parse_message(text)

    def listen(self, on_message: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        """Call `on_message` for each message, from a thread. A malformed message is logged, and reading continues."""

        def read() -> None:
            try:
                while True:
                    try:
                        message = self.receive()
                    except MalformedMessage as error:
                        log_drop(self.address, error.what)
                        if error.what != _NOT_AN_OBJECT:
                            return  # what follows cannot be authenticated or delimited
                        continue
                    if message is None:
                        return
                    on_message(message)
            finally:
                on_end()
                self._close_end()

        threading.Thread(target=read, name="peer", daemon=True).start()

    def end_sending(self) -> None:
        """Close the sending direction. The other end may still send, and earlier messages still arrive."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._close_end()

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._connection.close()

    def _close_end(self) -> None:
        with self._lock:
            self._open_ends -= 1
            if self._open_ends == 0:
                self._connection.close()


_NOT_AN_OBJECT = "a message is not a JSON object"


def parse_message(text: bytes) -> Message:
    """A JSON object, or MalformedMessage."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or brackets nested too deeply
        message = None
    if not isinstance(message, dict):
        raise MalformedMessage(_NOT_AN_OBJECT)
    return message


def _sign(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8) + text, "sha256")


def connect(host: str, port: int, secret: bytes, context: str, timeout_s: float = PROOF_TIMEOUT_S) -> Peer:
    """Connect to a node of the run. Raises OSError, and NotProved if the server does not know the secret."""
    deadline_s = time.monotonic() + timeout_s
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        keys = prove_as_client(connection, secret, context, deadline_s)
    except BaseException:
        connection.close()
        raise
    return Peer(connection, keys, f"{host}:{port}")


class PeerServer:
    """Accepts connections at a port until it is closed. Calls `on_peer` for clients that have proved the secret."""

    def __init__(self, listener: socket.socket, secret: bytes, context: str, on_peer: Callable[[Peer], None]) -> None:
        self._listener, self._secret, self._context, self._on_peer = listener, secret, context, on_peer
        self._unproved: dict[socket.socket, None] = {}  # in the order of their arrival
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="peer-server", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, address = self._listener.accept()
            except OSError:
                time.sleep(0.05)  # too many open files, or a client that has disconnected
                continue
            self._make_room(connection)
            threading.Thread(
                target=self._admit, args=(connection, str(address[0]).removeprefix("::ffff:")), daemon=True
            ).start()

    def _make_room(self, newest: socket.socket) -> None:
        """Close the oldest connection if too many are unproved. A node of the run needs only milliseconds."""
        with self._lock:
            self._unproved[newest] = None
            if len(self._unproved) > _MOST_UNPROVED:
                oldest = next(iter(self._unproved))
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _admit(self, connection: socket.socket, address: str) -> None:
        try:
            keys = prove_as_server(connection, self._secret, self._context, time.monotonic() + PROOF_TIMEOUT_S)
        except OSError as error:
            log_drop(address, str(error))
            _turn_away(connection)
            return
        finally:
            with self._lock:
                self._unproved.pop(connection, None)
        self._on_peer(Peer(connection, keys, address))


def _turn_away(connection: socket.socket) -> None:
    """Close. Received data is read first; otherwise the kernel would reset the connection."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        connection.setblocking(False)
        connection.recv(1 << 16)
    connection.close()


# --- The log ----------------------------------------------------------------------------------------------------------

_drops = 0
_drops_lock = threading.Lock()


def log_drop(address: str, reason: str) -> None:
    """Warn on standard error: the first few times, then each time their number doubles. Shows no received data."""
    global _drops
    with _drops_lock:
        _drops += 1
        number = _drops
    if number <= 8 or number & (number - 1) == 0:
        print(f"warning: dropped what {address} sent: {reason} ({number} so far)", file=sys.stderr, flush=True)


def listen_on_all_addresses(port: int) -> socket.socket:
    """For nodes that connect to any name of this node, over IPv4 and IPv6. Raises OSError."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # also a kernel without IPv6 reports that it has it
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", port), backlog=256)


def listen_on_loopback() -> socket.socket:
    """At any free port, for this machine only."""
    try:
        return socket.create_server(("127.0.0.1", 0), backlog=256)
    except OSError:
        return socket.create_server(("::1", 0), family=socket.AF_INET6, backlog=256)


def loopback_interface() -> str | None:
    """Its name: lo on Linux, lo0 on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
