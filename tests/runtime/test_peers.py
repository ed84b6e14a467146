"""Connections whose ends prove a secret to each other, and the messages on them."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue

import pytest

from paceline.errors import UserError
from paceline.launch.gang_messages import Ended, decode, encode
from paceline.runtime import peers as peers_module
from paceline.runtime.peers import (
    MalformedMessage,
    Message,
    Peer,
    PeerServer,
    connect,
    listen_on_loopback,
    parse_message,
)
from paceline.runtime.secret import (
    RUN_SECRET,
    NotProved,
    SessionKeys,
    create_secret,
    prove_as_client,
    prove_as_server,
    read_secret,
    take_secret,
)

SECRET = create_secret().encode()
SOON_S = 10.0


@contextmanager
def serving(context: str = "test") -> Iterator[tuple[int, SimpleQueue[Peer]]]:
    peers: SimpleQueue[Peer] = SimpleQueue()
    listener = listen_on_loopback()
    server = PeerServer(listener, SECRET, context, peers.put)
    try:
        yield listener.getsockname()[1], peers
    finally:
        server.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with listen_on_loopback() as listener:
        client = socket.create_connection(listener.getsockname()[:2])
        return client, listener.accept()[0]


def test_both_ends_prove_the_secret() -> None:
    """A peer with the secret is accepted, and messages work in both directions."""
    with serving() as (port, peers):
        client = connect("127.0.0.1", port, SECRET, "test")
        server = peers.get(timeout=SOON_S)
        client.send({"hello": 1})
        server.send({"welcome": 2})
        assert server.receive() == {"hello": 1}
        assert client.receive() == {"welcome": 2}
        client.close()
        assert server.receive() is None
        server.close()


@pytest.mark.parametrize(("is_same", "context"), [(False, "test"), (True, "another start")])
def test_another_secret_or_another_start_is_refused(is_same: bool, context: str) -> None:
    """Neither end accepts a peer with another secret, or with the same secret for another purpose."""
    with serving() as (port, peers):
        with pytest.raises(NotProved):
            connect("127.0.0.1", port, SECRET if is_same else create_secret().encode(), context)
        assert peers.empty()


def test_a_server_without_the_secret_is_refused() -> None:
    """A client sends nothing to a foreign server. Its own proof, sent back, is not accepted."""

    def mirror(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            greeting = connection.recv(40)
            connection.sendall(greeting + greeting[8:])
            heard.append(connection.recv(100))

    heard: list[bytes] = []
    with listen_on_loopback() as listener:
        thread = threading.Thread(target=mirror, args=(listener,))
        thread.start()
        with pytest.raises(NotProved):
            connect("127.0.0.1", listener.getsockname()[1], SECRET, "test")
        thread.join(SOON_S)
    assert heard == [b""]


def test_proofs_differ_each_time() -> None:
    """A recorded proof is useless: both ends draw new numbers for each connection."""
    recorded = []
    for _ in range(2):
        left, right = socket.socketpair()
        with left, right:
            deadline = time.monotonic() + SOON_S
            keys: list[SessionKeys] = []
            thread = threading.Thread(
                target=lambda: keys.append(prove_as_server(right, SECRET, "test", deadline))  # noqa: B023
            )
            thread.start()
            client = prove_as_client(left, SECRET, "test", deadline)
            thread.join(SOON_S)
        assert (client.send, client.receive) == (keys[0].receive, keys[0].send)
        assert client.send != client.receive
        recorded.append(client)
    assert recorded[0] != recorded[1]


@pytest.mark.parametrize("said", [b'{"hello":1}\n{"ended":2}\n', b"\0" * 1000, b"x" * 100_000, b"qaceline" + b"y" * 64])
def test_a_client_is_dropped_and_logged(
    said: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log names the client and shows nothing of its data."""
    monkeypatch.setattr(peers_module, "_drops", 0)
    with serving() as (port, peers):
        with socket.create_connection(("127.0.0.1", port), timeout=SOON_S) as client, suppress(OSError):
            client.sendall(said)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1000):
                continue
        connect("127.0.0.1", port, SECRET, "test").close()  # the next client is served
        peers.get(timeout=SOON_S).close()
        assert peers.empty()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: dropped what 127.0.0.1 sent: ")
    assert said[:8].decode() not in line


@pytest.mark.parametrize("change", ["text", "signature", "length", "repeated"])
def test_a_changed_message_is_refused(change: str) -> None:
    """A message that was changed, or sent twice, is refused."""
    raw, end = tcp_pair()
    wire, tap = tcp_pair()
    keys = SessionKeys(b"a" * 32, b"b" * 32)
    right, recorder = Peer(end, SessionKeys(keys.receive, keys.send), "right"), Peer(wire, keys, "recorder")
    recorder.send({"go": 1})
    message = bytearray(tap.recv(1000))
    if change == "repeated":
        raw.sendall(message)
        assert right.receive() == {"go": 1}
    else:
        message[{"text": -2, "signature": 10, "length": 0}[change]] ^= 0x55
    raw.sendall(message)
    with pytest.raises(MalformedMessage):
        right.receive()
    for item in (right, recorder, raw, tap):
        item.close()


def test_only_objects_are_messages() -> None:
    """Ten thousand mutated messages: each is an object, or our own error."""
    generator = random.Random(3)
    seeds = [b'{"do": "end", "code": 0, "node": -1}', b'{"hello": 1}', b'{"ended": 2}', b"[" * 5000, b'{"a":' * 5000]
    for _ in range(10_000):
        text = bytearray(generator.choice(seeds))
        for _ in range(generator.randrange(4)):
            place = generator.randrange(len(text))
            text[place : place + generator.randrange(3)] = generator.randbytes(generator.randrange(3))
        try:
            assert isinstance(parse_message(bytes(text)), dict)
        except MalformedMessage:
            continue


@pytest.mark.parametrize("value", ["x", None, True, 1.0, [1], -1, 256, 10**400])
def test_numbers_of_messages_are_checked(value: object) -> None:
    """A number of the wrong type or out of range is our own error."""
    message: Message = json.loads(json.dumps({**encode(Ended(0, "")), "code": value}))
    with pytest.raises(MalformedMessage):
        decode(message)


def test_the_secret_leaves_the_environment() -> None:
    """Ranks run user code and do not see the secret."""
    surroundings = {RUN_SECRET: SECRET.decode() + "\n", "OTHER": "1"}
    taken = take_secret(surroundings)
    assert read_secret(taken) == SECRET
    assert surroundings == {"OTHER": "1"}
    assert take_secret(surroundings) == {}


@pytest.mark.parametrize("text", ["", "short", "x" * 31, "x" * 5000])
def test_a_weak_secret_is_refused(text: str) -> None:
    """The error names the variable, not its value."""
    with pytest.raises(UserError) as refused:
        read_secret({RUN_SECRET: text})
    assert RUN_SECRET in str(refused.value.where)
    assert not text or text not in refused.value.screen()


def test_secrets_are_random() -> None:
    """256 random bits each time."""
    assert len({create_secret() for _ in range(100)}) == 100
    assert len(bytes.fromhex(create_secret())) == 32
    assert os.environ.get(RUN_SECRET) is None
