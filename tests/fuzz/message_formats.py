"""Messages between the nodes of a run: the bytes of a connection, and what the gangs do with a message."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutations import mutate_bytes, mutate_json
from fuzz.sandbox import LOOPBACK, Format, Reader
from paceline.integrations.kubernetes import gang as kubernetes_gang
from paceline.integrations.metaflow import gang as metaflow_gang
from paceline.runtime.peers import _HEADER, Peer, _sign, parse_message
from paceline.runtime.secret import SessionKeys

_NODES = 3
_KEYS = SessionKeys(send=b"s" * 32, receive=b"r" * 32)
_ABOUT = [{"node": node, "host": f"host-{node}", "gpus": 2} for node in range(_NODES)]
_SAMPLES: dict[str, dict[str, Any]] = {
    "kubernetes hello": {"hello": 1},
    "kubernetes go": {"go": 29500},
    "kubernetes ended": {"ended": 2},
    "kubernetes verdict": {"do": "fail", "code": 3, "node": 1},
    "metaflow hello": _ABOUT[1],
    "metaflow answer": {"layout": _ABOUT, "plan": {"port": 29500, "ranks": [2, 2, 2], "resume": "latest"}},
}
_HANDLERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "kubernetes hello": lambda message: kubernetes_gang.read_hello(message, _NODES),
    "kubernetes go": kubernetes_gang.read_go,
    "kubernetes ended": kubernetes_gang.read_ended,
    "kubernetes verdict": lambda message: kubernetes_gang.read_verdict(message, _NODES),
    "metaflow hello": lambda message: metaflow_gang.read_hello(message, _NODES),
    "metaflow answer": lambda message: metaflow_gang.read_answer(message, _NODES),
}


def _frame(text: bytes) -> bytes:
    return _HEADER.pack(len(text), _sign(_KEYS.receive, 0, text)) + text


def _mutate_frame(data: bytes, draw: Random) -> bytes:
    """The frame itself, or its text with the signature of somebody who knows the secret."""
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
        _HANDLERS[name](parse_message((folder / "message").read_bytes()))

    return Format(f"message/{name}", build, "message", mutate_json, (Reader(name, handle),))


def _build_frame(samples: Path, folder: Path) -> None:
    (folder / "message").write_bytes(_frame(json.dumps(_SAMPLES["metaflow answer"]).encode()))


RECEIVE = (Reader("receive", _receive),)
FORMATS = (
    *(_message(name) for name in _SAMPLES),
    Format(
        "message/frame", _build_frame, "message", _mutate_frame, (Reader("receive", _receive),), may_run=(LOOPBACK,)
    ),
)
