"""Memory that all ranks of a node share: one rank makes it, the others open it through /proc.

It is an anonymous file (memfd), so nothing needs cleaning up: the kernel frees it when the last rank exits for any
reason. Neither the size of /dev/shm nor a full disk limits it. It is not available on systems other than Linux, or if
ranks do not see each other's processes. Every function here then says so, and each rank uses its own memory.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from paceline.runtime.detect import World

SWITCH = "PACELINE_NODE_MEMORY"  # "off": ranks share no memory
HEADER_BYTES = 4096  # the first page holds a token that identifies the memory; the shared data follows it
_TOKEN_BYTES = 16

Exchange = Callable[[str], list[str]]  # every rank's text on every rank: gather_texts of a group


@dataclass(frozen=True)
class NodeMemory:
    """One block of shared memory, mapped into this rank."""

    memory: mmap.mmap
    file: int  # its descriptor; locks on it end with the process that holds them

    def __post_init__(self) -> None:
        # Views of the memory may outlive this object. An open descriptor would keep the memory for ever.
        weakref.finalize(self, os.close, self.file)

    def hold_place(self, place: int) -> None:
        """Lock the byte of this number. The kernel releases the lock when this process ends."""
        fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)

    def is_held(self, place: int) -> bool:
        """Whether the other process that holds this place is alive."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, place)
        except OSError:
            return True
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, place)
        return False


def has_node_memory(world: World) -> bool:
    """Whether this rank has other ranks on its node and sharing is allowed. The answer may differ between nodes."""
    is_wanted = os.environ.get(SWITCH, "") != "off"
    return is_wanted and world.local_world_size > 1 and hasattr(os, "memfd_create")


def share_memory(
    size_bytes: int, world: World, exchange: Exchange, fill: Callable[[NodeMemory], None]
) -> NodeMemory | None:
    """The node's shared memory of this many bytes after the header. None on a rank that cannot map it. Collective.

    The first rank of a node (local rank 0) makes and fills it before the others see it. A rank that is alone on its
    node takes part in the exchange and gets None.
    """
    mine, ticket, failure = None, "", None
    if world.local_rank == 0 and has_node_memory(world):
        try:
            mine, ticket = _make(HEADER_BYTES + size_bytes, fill)
        except Exception as error:  # raised after the exchange: the other ranks wait for the ticket
            failure = error
    offers = exchange(json.dumps([world.host, ticket]))
    if world.local_rank != 0 and has_node_memory(world):
        tickets = [ticket for host, ticket in map(json.loads, offers) if host == world.host and ticket]
        mine = next(filter(None, map(_find, tickets)), None)
    exchange("")  # the maker must keep it open until every rank has mapped it
    if failure is not None:
        raise failure
    return mine


def _make(size_bytes: int, fill: Callable[[NodeMemory], None]) -> tuple[NodeMemory | None, str]:
    try:
        file = os.memfd_create("paceline")
    except OSError:
        return None, ""
    try:
        os.posix_fallocate(file, 0, size_bytes)  # fail now, not with a bus error later
        memory = mmap.mmap(file, size_bytes)
    except OSError:
        os.close(file)
        return None, ""
    token = secrets.token_bytes(_TOKEN_BYTES)
    memory[:_TOKEN_BYTES] = token
    shared = NodeMemory(memory, file)
    fill(shared)
    return shared, json.dumps([os.getpid(), file, token.hex()])


def _find(ticket: str) -> NodeMemory | None:
    pid, number, token = json.loads(ticket)
    try:
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # in another container, or not allowed to look
        return None
    try:
        # MAP_POPULATE maps every page now, not one by one when training first uses it.
        memory = mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        if memory[:_TOKEN_BYTES] == bytes.fromhex(token):
            return NodeMemory(memory, file)
    except (OSError, ValueError):
        pass
    os.close(file)  # the same pid and descriptor belong to another file here
    return None
