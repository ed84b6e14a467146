"""Memory that all ranks of a node see: one of them makes it, the others find it through /proc.

It has no name anywhere (memfd), so there is nothing to clean up: it is gone when the last rank is gone, however it
went, and neither the size of /dev/shm nor a full disk limits it. Where it cannot be had - another system than Linux,
ranks that do not see each other's processes - every function here says so, and a rank keeps to memory of its own.
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

from paceline.world.detect import World

SWITCH = "PACELINE_NODE_MEMORY"  # "off": every rank keeps to itself
HEADER_BYTES = 4096  # the first page proves that two ranks look at the same memory; what is shared lies behind it
_TOKEN_BYTES = 16

Exchange = Callable[[str], list[str]]  # every rank's text on every rank: gather_texts of a group


@dataclass(frozen=True)
class NodeMemory:
    """One piece of it, as this rank sees it."""

    memory: mmap.mmap
    file: int  # its descriptor; locks on it end with the process that holds them

    def __post_init__(self) -> None:
        # What maps the memory may live on without this; a descriptor left open would keep the memory for ever.
        weakref.finalize(self, os.close, self.file)

    def hold_place(self, place: int) -> None:
        """Leave a sign of life under this number. The kernel takes it away when this process ends."""
        fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)

    def is_held(self, place: int) -> bool:
        """Whether the process that took this place, another one than this, is alive."""
        try:
            fcntl.lockf(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, place)
        except OSError:
            return True
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, place)
        return False


def has_node_memory(world: World) -> bool:
    """Whether this rank has anybody to share with, and it may be tried. Other nodes may answer otherwise."""
    is_wanted = os.environ.get(SWITCH, "") != "off"
    return is_wanted and world.local_world_size > 1 and hasattr(os, "memfd_create")


def share_memory(
    size_bytes: int, world: World, exchange: Exchange, fill: Callable[[NodeMemory], None]
) -> NodeMemory | None:
    """The node's memory of this many bytes behind its header; None on a rank that cannot have it. Collective.

    The first rank of a node (local rank 0) makes and fills it before the others see it. A rank alone on its node takes
    part in the exchange, and gets nothing.
    """
    mine, ticket, failure = None, "", None
    if world.local_rank == 0 and has_node_memory(world):
        try:
            mine, ticket = _make(HEADER_BYTES + size_bytes, fill)
        except Exception as error:  # raised once the others, who wait for the ticket, know that there is none
            failure = error
    offers = exchange(json.dumps([world.host, ticket]))
    if world.local_rank != 0 and has_node_memory(world):
        tickets = [ticket for host, ticket in map(json.loads, offers) if host == world.host and ticket]
        mine = next(filter(None, map(_find, tickets)), None)
    exchange("")  # the maker must live, and keep it open, until everybody has looked
    if failure is not None:
        raise failure
    return mine


def _make(size_bytes: int, fill: Callable[[NodeMemory], None]) -> tuple[NodeMemory | None, str]:
    try:
        file = os.memfd_create("paceline")
    except OSError:
        return None, ""
    try:
        os.posix_fallocate(file, 0, size_bytes)  # now, not as a bus error later
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
        # Every page is entered into this process's tables now, not one by one when training first touches it.
        memory = mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        if memory[:_TOKEN_BYTES] == bytes.fromhex(token):
            return NodeMemory(memory, file)
    except (OSError, ValueError):
        pass
    os.close(file)  # the same numbers belong to something else here
    return None
