"""The secret of a run on several nodes, and its proof. Imports no torch.

The nodes of a run share a random secret. It is passed only in the environment of processes that a launcher starts. Both
ends of a connection first prove that they know it: each sends a random number, and each answers with an HMAC over both
numbers. The secret itself is never sent, and a recorded proof cannot be used again.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from paceline.errors import UserError

RUN_SECRET = "PACELINE_RUN_SECRET"
_SHORTEST = 32  # characters: shorter secrets could be guessed
_LONGEST = 4096
_GREETING = b"paceline"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size


class NotProved(OSError):
    """The other end of a connection did not prove that it knows the secret."""


@dataclass(frozen=True)
class SessionKeys:
    """Keys of one connection, one per direction, derived from the secret and both random numbers."""

    send: bytes
    receive: bytes


def create_secret() -> str:
    return secrets.token_hex(32)


def read_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """The run's secret. UserError if it is not set or has the wrong length."""
    text = environment.get(RUN_SECRET, "").strip()
    if not _SHORTEST <= len(text) <= _LONGEST:
        raise UserError(
            "a run on several nodes needs a secret that all of them know"
            if not text
            else "the run's secret has the wrong length",
            where=f"variable {RUN_SECRET} of the environment",
            got=f"{len(text)} characters" if text else "it is not set",
            allowed=f"random text of {_SHORTEST} characters or more, the same on every node",
            hint=f"once, before the nodes start: export {RUN_SECRET}=$(openssl rand -hex 32)\n"
            "paceline submit does this by itself",
        )
    return text.encode()


def take_secret(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Remove the variable from the environment: ranks run the user's code and do not need it. Empty if not set."""
    return {RUN_SECRET: environment.pop(RUN_SECRET)} if RUN_SECRET in environment else {}


def prove_as_client(connection: socket.socket, secret: bytes, context: str, deadline_s: float) -> SessionKeys:
    """Prove the secret to the server and check the server's proof. `context`: the purpose of the connection."""
    own = secrets.token_bytes(_NONCE_BYTES)
    _send(connection, _GREETING + own, deadline_s)
    _require_greeting(connection, deadline_s)
    answer = receive_exactly(connection, _NONCE_BYTES + _PROOF_BYTES, deadline_s)
    transcript = _transcript(context, own, answer[:_NONCE_BYTES])
    _require(answer[_NONCE_BYTES:], _derive(secret, b"server proof", transcript))
    _send(connection, _derive(secret, b"client proof", transcript), deadline_s)
    return SessionKeys(_derive(secret, b"client key", transcript), _derive(secret, b"server key", transcript))


def prove_as_server(connection: socket.socket, secret: bytes, context: str, deadline_s: float) -> SessionKeys:
    """The server's side of `prove_as_client`. A client without the right greeting gets no answer."""
    _require_greeting(connection, deadline_s)
    theirs = receive_exactly(connection, _NONCE_BYTES, deadline_s)
    own = secrets.token_bytes(_NONCE_BYTES)
    transcript = _transcript(context, theirs, own)
    _send(connection, _GREETING + own + _derive(secret, b"server proof", transcript), deadline_s)
    _require(
        receive_exactly(connection, _PROOF_BYTES, deadline_s),
        _derive(secret, b"client proof", transcript),
    )
    return SessionKeys(_derive(secret, b"server key", transcript), _derive(secret, b"client key", transcript))


def receive_exactly(connection: socket.socket, size: int, deadline_s: float | None) -> bytes:
    """Receive `size` bytes before a deadline of the monotonic clock. None: no deadline."""
    data = bytearray()
    while len(data) < size:
        _limit(connection, deadline_s)
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        data += part
    return bytes(data)


def _require_greeting(connection: socket.socket, deadline_s: float) -> None:
    """Refuse at the first wrong byte, without waiting for the rest."""
    for expected in _GREETING:
        if receive_exactly(connection, 1, deadline_s)[0] != expected:
            raise NotProved("it does not use the protocol of a run's nodes")


def _require(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise NotProved("it does not know the run's secret, or belongs to another start of the run")


def _transcript(context: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return hashlib.sha256(context.encode()).digest() + client_nonce + server_nonce


def _derive(secret: bytes, purpose: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"paceline/1 " + purpose + b"\0" + transcript, "sha256")


def _send(connection: socket.socket, data: bytes, deadline_s: float) -> None:
    _limit(connection, deadline_s)
    connection.sendall(data)


def _limit(connection: socket.socket, deadline_s: float | None) -> None:
    """Set the socket timeout to the time until the deadline, so a peer that sends single bytes cannot extend it."""
    if deadline_s is None:
        connection.settimeout(None)
        return
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it took too long")
    connection.settimeout(left_s)
