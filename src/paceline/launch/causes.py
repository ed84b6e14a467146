"""Known causes of failure, recognised by what they leave behind, each with one hint. Pure text."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from paceline.runtime.open_files import OPEN_FILES_HINT


@dataclass(frozen=True)
class Cause:
    """What happened, in words, and what to do about it."""

    name: str  # a short word for failure.json
    words: str
    hint: str | None = None


_PEER_LOST = re.compile(
    r"connection (closed|reset) by peer|broken pipe|connection was likely closed|socket closed|remote process exited"
    r"|did the remote (server|peer) shutdown|gloo.*(closed|reset)|nccl.*(remote|unhandled system) error",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed out waiting|wait timeout|watchdog.*timeout|collective operation timeout", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|memoryerror", re.IGNORECASE)
_SHARED_MEMORY = re.compile(r"bus error|/dev/shm|shared memory|unable to (open|write|mmap).*shm", re.IGNORECASE)
_PORT_TAKEN = re.compile(r"address already in use|eaddrinuse", re.IGNORECASE)
_FILES_OPEN = re.compile(r"too many open files|emfile|enfile", re.IGNORECASE)
_DISK_FULL = re.compile(r"no space left|disk quota exceeded|enospc", re.IGNORECASE)


def is_peer_loss(text: str) -> bool:
    """An error that only says another rank is gone: a consequence, never the cause."""
    return _PEER_LOST.search(text) is not None


def name_cause(
    text: str, exit_code: int | None, *, memory_mb: list[float], fitted: int, oom_kills: int, is_hung: bool
) -> Cause | None:
    """The cause behind a rank's last words and exit code; None where nothing is known.

    memory_mb: the rank's resident memory over its last seconds. fitted: the largest microbatch that went through.
    oom_kills: processes the kernel killed for memory in this container during the attempt.
    """
    batch = f"; the largest microbatch that fitted had {fitted} samples" if fitted else ""
    memory_hint = "--auto-microbatch, a larger --accumulate, or --strategy fsdp"
    if is_hung:
        return None  # the report says where every rank stands
    if exit_code is not None and exit_code < 0 and not text:
        return _killed(-exit_code, memory_mb, oom_kills, batch, memory_hint)
    if exit_code is not None and not text:
        hint = "does a function or a library of yours call os._exit?"
        return Cause("exited", "the process was ended from inside, before the run was finished", hint)
    if _OUT_OF_MEMORY.search(text):
        return Cause("out-of-memory", f"the rank ran out of memory{batch}", memory_hint)
    table = (
        (_DISK_FULL, "disk-full", "a disk is full", "make room, then --resume auto; --keep-last 1 takes less"),
        (_FILES_OPEN, "open-files", "a process may open no more files", OPEN_FILES_HINT),
        (_SHARED_MEMORY, "shared-memory", "shared memory is too small", "a larger /dev/shm (docker run --shm-size=8g)"),
        (_PORT_TAKEN, "port-taken", "a port was taken by another program", "start again: another one is chosen"),
        (_PEER_LOST, "peer-lost", "another rank went away", "look at the logs of the other nodes"),
        (
            _TIMED_OUT,
            "timeout",
            "ranks waited for each other in vain",
            "is one node slow, or cut off?",
        ),
    )
    for pattern, name, words, hint in table:
        if pattern.search(text):
            return Cause(name, words, hint)
    return None


def _killed(number: int, memory_mb: list[float], oom_kills: int, batch: str, memory_hint: str) -> Cause:
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        trend = _trend(memory_mb)
        if oom_kills or (len(memory_mb) > 1 and memory_mb[-1] > 2 * memory_mb[0] + 256):
            sure = "by the kernel, out of memory" if oom_kills else "likely out of memory"
            return Cause("oom-killed", f"killed, {sure}{trend}{batch}", memory_hint + ", or more memory for the job")
        return Cause("killed", f"not sent by paceline{trend}", "dmesg or the scheduler's log may say who")
    if number == signal.SIGBUS:
        what = "ended by SIGBUS: shared memory is too small, or a mapped file was cut short"
        return Cause("shared-memory", what, "a larger /dev/shm; for packed data: paceline data check")
    return Cause("crashed", f"crashed with {name}", "the stack may be in the rank's log; PYTHONFAULTHANDLER=1 shows it")


def _trend(memory_mb: list[float]) -> str:
    if len(memory_mb) < 2:
        return ""
    return f" (memory went from {memory_mb[0]:,.0f} to {memory_mb[-1]:,.0f} MB)"
