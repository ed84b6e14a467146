"""The messages between the nodes of a gang, their strict decoder, and the outcome that follows from exit codes. Pure.

Node 0 is the leader. Every other node sends `Hello` to it. When all have, the leader answers with `Start`. A node whose
command has ended sends `Ended`. The leader sends `Upload` for each checkpoint in a datastore, and `Outcome` once.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from paceline.errors import EXIT_FINISHED, EXIT_PREEMPTED
from paceline.launch.policy import FINAL_CODES
from paceline.runtime.peers import MalformedMessage, Message

_STOPPED = (EXIT_PREEMPTED, 128 + signal.SIGTERM)
LONGEST_TEXT = 4000
_T = TypeVar("_T")


def _within(low: int, high: int) -> Any:
    return field(metadata={"low": low, "high": high})


@dataclass(frozen=True)
class Hello:
    """A node describes itself."""

    node: int = _within(0, 1 << 20)
    host: str
    machine: str  # equal for nodes that share a machine
    cores: int = _within(1, 1 << 20)
    processes: int = _within(0, 1 << 20)  # ranks it starts; 0: the plan decides


@dataclass(frozen=True)
class Start:
    """All nodes are connected."""

    nodes: tuple[Hello, ...]  # in the order of their numbers
    port: int = _within(0, 65535)  # of the leader, for what is started next
    plan: dict[str, Any]  # what the integration has decided on the leader


@dataclass(frozen=True)
class Ended:
    """The command of a node has ended."""

    code: int = _within(0, 255)
    error: str  # the end of its standard error, if it has failed


@dataclass(frozen=True)
class Upload:
    """A checkpoint is in the datastore."""

    key: str
    best_key: str  # of the best checkpoint so far; empty: this one, or none yet


@dataclass(frozen=True)
class Outcome:
    """How the gang continues.

    end: every node ends with `code`. replace: `node` failed first and ends with `code`; the others restart.
    restart: every node restarts.
    """

    action: Literal["end", "replace", "restart"]
    code: int = _within(0, 255)
    node: int = _within(-1, 1 << 20)
    reason: str

    @property
    def is_failure(self) -> bool:
        return self.action != "end" or is_failure(self.code)


GangMessage = Hello | Start | Ended | Upload | Outcome
_TYPES: dict[str, type[GangMessage]] = {kind.__name__.lower(): kind for kind in get_args(GangMessage)}


def encode(message: GangMessage) -> Message:
    return {"type": type(message).__name__.lower(), **asdict(message)}


def decode(message: Message) -> GangMessage:
    """Raises MalformedMessage unless it is one of the messages above, with exactly its fields."""
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise MalformedMessage("'type' of a message is unknown")
    return build(_TYPES[kind], {name: value for name, value in message.items() if name != "type"})


def build(kind: type[_T], values: Any) -> _T:
    """A dataclass from JSON. Every field must be present and have its type. Raises MalformedMessage."""
    hints = get_type_hints(kind)
    if not isinstance(values, dict) or values.keys() != hints.keys():
        raise MalformedMessage(f"{kind.__name__} has other fields")
    limits = {item.name: item.metadata for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _check(name, values[name], hint, limits[name]) for name, hint in hints.items()})


def _check(name: str, value: Any, hint: Any, limits: Mapping[str, int]) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is int and type(value) is int:  # JSON's `true` is not a number
        if limits and not limits["low"] <= value <= limits["high"]:
            raise MalformedMessage(f"{name!r} of a message is not from {limits['low']} to {limits['high']}")
        return value
    if hint is str and isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            raise MalformedMessage(f"{name!r} of a message is longer than {LONGEST_TEXT} characters")
        return value
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_check(name, item, arguments[0], {}) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _check(name, item, arguments[1], {}) for key, item in value.items()}
    if hint is Any:
        return value
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
        return build(hint, value)
    raise MalformedMessage(f"{name!r} of a message has another type")


def decide(codes: Mapping[int, int], nodes: int) -> Outcome | None:
    """What follows from the exit codes of nodes, in the order in which they ended. None: wait for the others."""
    for node, code in codes.items():
        if code in FINAL_CODES:
            return Outcome("end", code, node, f"node {node} ended with exit code {code}")
    for node, code in codes.items():
        if is_failure(code):  # the first failure is the likely cause; a new node may be a better one
            return Outcome("replace", code, node, f"node {node} ended with exit code {code}")
    if len(codes) < nodes:
        return None  # a stop request reaches every node, and some may still be saving
    if set(codes.values()) == {EXIT_FINISHED}:
        return Outcome("end", EXIT_FINISHED, -1, "all nodes have finished")
    return Outcome("restart", EXIT_FINISHED, -1, "all nodes have stopped")


def is_failure(code: int) -> bool:
    return code != EXIT_FINISHED and code not in _STOPPED
