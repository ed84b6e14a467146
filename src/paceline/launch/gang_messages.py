"""The messages between the nodes of a gang, their strict decoder, and the outcome that follows from exit codes. Pure.

Node 0 is the leader. Every other node sends `Hello` to it. When all have, the leader answers with `Start`. A node whose
command has ended sends `Ended`. The leader sends `Upload` for each checkpoint in a datastore, and `Outcome` once.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from paceline.errors import EXIT_FINISHED, EXIT_PREEMPTED
from paceline.launch.policy import FINAL_CODES
from paceline.runtime.peers import MalformedMessage, Message

_STOPPED = (EXIT_PREEMPTED, 128 + signal.SIGTERM)
LONGEST_TEXT = 4000
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Within:
    """The range of a number."""

    low: int
    high: int


_Count = Annotated[int, _Within(0, 1 << 20)]
_ExitCode = Annotated[int, _Within(0, 255)]


@dataclass(frozen=True)
class Hello:
    """A node describes itself."""

    node: _Count
    host: str
    machine: str  # equal for nodes that share a machine
    cores: Annotated[int, _Within(1, 1 << 20)]
    processes: _Count  # ranks it starts; 0: the plan decides


@dataclass(frozen=True)
class Start:
    """All nodes are connected."""

    nodes: tuple[Hello, ...]  # in the order of their numbers
    port: Annotated[int, _Within(0, 65535)]  # of the leader, for what is started next
    plan: dict[str, Any]  # what the integration has decided on the leader


@dataclass(frozen=True)
class Ended:
    """The command of a node has ended."""

    code: _ExitCode
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
    code: _ExitCode
    node: Annotated[int, _Within(-1, 1 << 20)]
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
    hints = get_type_hints(kind, include_extras=True)
    if not isinstance(values, dict) or values.keys() != hints.keys():
        raise MalformedMessage(f"{kind.__name__} has other fields")
    return kind(**{name: _check(name, values[name], hint) for name, hint in hints.items()})


def _check(name: str, value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated and type(value) is int:  # JSON's `true` is not a number
        if arguments[1].low <= value <= arguments[1].high:
            return value
        raise MalformedMessage(f"{name!r} of a message is not from {arguments[1].low} to {arguments[1].high}")
    if hint is str and isinstance(value, str) and len(value) <= LONGEST_TEXT:
        return value
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_check(name, item, arguments[0]) for item in value)
    if origin is dict and isinstance(value, dict):
        return {key: _check(name, item, arguments[1]) for key, item in value.items()}
    if hint is Any:
        return value
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value)
    raise MalformedMessage(f"{name!r} of a message has another type, or is too long")


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
