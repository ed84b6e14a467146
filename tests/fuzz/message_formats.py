"""Messages between the nodes of a run: the bytes of a connection, and the messages of a gang."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutations import mutate_bytes, mutate_json
from fuzz.sandbox import LOOPBACK, Format, Reader
from paceline.integrations.metaflow.node import NodePlan
from paceline.launch.gang_messages import Ended, Hello, Outcome, Start, Upload, build, decode, encode
from paceline.runtime.peers import _HEADER, Peer, _sign, parse_message
from paceline.runtime.secret import SessionKeys

_KEYS = SessionKeys(send=b"s" * 32, receive=b"r" * 32)
_PLAN = {"folder": "/run", "mark": "m", "keys": ["a", "b"], "origin": "step 3", "device": "", "gpus": {"0": "0,1"}}
_HELLOS = tuple(Hello(node, f"host-{node}", "machine", 8, 2) for node in range(3))
_SAMPLES: dict[str, dict[str, Any]] = {
    "hello": encode(_HELLOS[1]),
    "start": encode(Start(_HELLOS, 29500, _PLAN)),
    "ended": encode(Ended(2, "text")),
    "upload": encode(Upload("key", "best key")),
    "outcome": encode(Outcome("replace", 3, 1, "node 1 ended with exit code 3")),
    "metaflow plan": _PLAN,
}


def _decode(name: str, message: dict[str, Any]) -> object:
    return build(NodePlan, message) if name == "metaflow plan" else decode(message)


def _frame(text: bytes) -> bytes:
    return _HEADER.pack(len(text), _sign(_KEYS.receive, 0, text)) + text


def _mutate_frame(data: bytes, draw: Random) -> bytes:
    """The frame itself, or its text with a signature by the right secret."""
    return mutate_bytes(data, draw) if draw.randrange(3) else _frame(mutate_json(data[_HEADER.size :], draw))


def _receive(folder: Path) -> None:
    """From a real socket that the other end closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        mine, _ = server.accept()
    with mine, other:
        peer = Peer(mine, _KEYS, "another node")
        other.settimeout(5.0)
        with suppress(OSError):
            other.sendall((folder / "message").read_bytes())
            other.shutdown(socket.SHUT_WR)
        while peer.receive() is not None:
            pass


def _message(name: str) -> Format:
    def build(samples: Path, folder: Path) -> None:
        (folder / "message").write_text(json.dumps(_SAMPLES[name]))

    def handle(folder: Path) -> None:
        _decode(name, parse_message((folder / "message").read_bytes()))

    return Format(f"message/{name}", build, "message", mutate_json, (Reader(name, handle),))


def _build_frame(samples: Path, folder: Path) -> None:
    (folder / "message").write_bytes(_frame(json.dumps(_SAMPLES["start"]).encode()))


RECEIVE = (Reader("receive", _receive),)
FORMATS = (
    *(_message(name) for name in _SAMPLES),
    Format(
        "message/frame", _build_frame, "message", _mutate_frame, (Reader("receive", _receive),), may_run=(LOOPBACK,)
    ),
)
