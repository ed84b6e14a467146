"""Standard output and error that can neither end nor block a run.

An ssh connection closes its terminal, `head` closes its pipe, a disk is full, a reader stops reading. `print` would
then raise or block. These streams do neither. If the console is lost, output goes to a log of the run. A slow reader
gets everything later, up to a limit in memory.
"""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PATIENCE_S = 1.0  # how long a run waits for a console that does not read
_PATIENCE_AT_END_S = 5.0
_MOST_WAITING_BYTES = 2**20
_CHUNK_BYTES = 4096  # PIPE_BUF: a pipe accepts this much atomically
_SMALL_CHUNK_BYTES = 256
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # do not follow a link in a run folder
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SafeStream(io.TextIOBase):
    """A text stream on a descriptor. Writing never raises and never blocks for long."""

    def __init__(self, descriptor: int, encoding: str) -> None:
        super().__init__()
        self.loss: str | None = None  # why the console is lost; None if it works
        self.is_slow = False  # the console is not reading at the moment
        self._descriptor = descriptor
        self._encoding = encoding
        self._lock = threading.RLock()
        self._begun = ""  # an incomplete line
        self._waiting = bytearray()  # not yet accepted by the console
        self._left_out = 0  # lines that went to the log only
        self._log: Path | None = None
        self._kept = bytearray()  # for the log, until its path is known
        self._how_to_stop = ""
        self._open()

    # --- The text stream interface

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"  # escape characters that the console cannot encode

    @property
    def buffer(self) -> IO[bytes]:
        return cast(IO[bytes], _Bytes(self))

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return self.loss is None and os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self.flush()

    def write(self, text: str) -> int:
        with self._lock:
            whole, has_end, rest = (self._begun + text).rpartition("\n")
            self._begun = rest
            if has_end:
                self._send((whole + "\n").encode(self._encoding, self.errors))
        return len(text)

    def flush(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, ""
            self._send(begun.encode(self._encoding, self.errors))

    # --- For the run

    def send_bytes(self, data: bytes) -> None:
        with self._lock:
            self.flush()
            self._send(data)

    def write_at_once(self, data: bytes) -> None:
        """For signal handlers: does not block, and does not take the lock, which the interrupted write may hold."""
        if self.loss is None and not self.is_slow:
            with suppress(OSError):
                os.write(self._target, data)

    def keep_in(self, log: Path, how_to_stop: str) -> None:
        """Set the log for output that the console does not accept."""
        with self._lock:
            self._log, self._how_to_stop = log, how_to_stop
            kept, self._kept = bytes(self._kept), bytearray()
            if self.loss is not None:
                self._divert()
            self._keep(kept)

    def send_to(self, log: Path) -> None:
        """Redirect all output to this file, including output of native libraries."""
        self.finish()
        with self._lock:
            self._log = log
            self._waiting.clear()
            self._divert()
            self._open()

    def finish(self) -> None:
        """Before the process ends, write what a slow console has not read yet."""
        with self._lock:
            self.flush()
            self.is_slow = False
            self._drain(_PATIENCE_AT_END_S)
            self._keep(bytes(self._waiting))
            self._waiting.clear()

    # --- Internals

    def _open(self) -> None:
        """Writes must not block. Other programs share O_NONBLOCK of an open file, so open the file again."""
        self._target = self._descriptor
        try:
            mode = os.fstat(self._descriptor).st_mode
        except OSError as error:  # closed before the start (`>&-`)
            self._lose(error)
            return
        self._may_block = not stat.S_ISREG(mode)
        self._is_own = False
        if stat.S_ISFIFO(mode) or os.isatty(self._descriptor):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with suppress(OSError):  # no /proc, or a terminal of another user
                self._target = os.open(f"/proc/self/fd/{self._descriptor}", flags)
                self._is_own = True

    def _send(self, data: bytes) -> None:
        if self.loss is not None:
            self._keep(data)
            return
        self._waiting += data
        if self._waiting:
            self._drain(_PATIENCE_S)
        if len(self._waiting) > _MOST_WAITING_BYTES:
            end = self._waiting.rfind(b"\n", 0, _MOST_WAITING_BYTES) + 1  # cut between lines
            surplus = bytes(self._waiting[end:])
            del self._waiting[end:]
            self._left_out += surplus.count(b"\n")
            self._keep(surplus)

    def _drain(self, patience_s: float) -> None:
        """Write waiting output while the console accepts it."""
        deadline_s = time.monotonic() + (0.0 if self.is_slow else patience_s)
        while self._waiting and self.loss is None:
            try:
                if self._may_block and not self._is_own and not self._is_ready(deadline_s):
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                size = _CHUNK_BYTES if self._is_own or not self._may_block else _SMALL_CHUNK_BYTES
                taken = os.write(self._target, self._waiting[:size])
            except BlockingIOError:
                if not self._is_ready(deadline_s):
                    self.is_slow = True
                    return
                continue
            except OSError as error:
                self._give_up(error)
                return
            del self._waiting[:taken]
            deadline_s = time.monotonic() + patience_s
        self.is_slow = False
        if self._left_out and self.loss is None:
            count, self._left_out = self._left_out, 0
            where = f" (they are in {self._log})" if self._log is not None else ""
            self._waiting += f"note: the console did not take {count} lines{where}\n".encode()
            self._drain(0.0)

    def _is_ready(self, deadline_s: float) -> bool:
        try:
            return bool(select.select([], [self._target], [], max(0.0, deadline_s - time.monotonic()))[1])
        except (OSError, ValueError):
            return True  # the write reports the error

    def _give_up(self, error: OSError) -> None:
        if error.errno in _NO_ROOM:  # space may become free again
            self._left_out += self._waiting.count(b"\n")
            self._keep(bytes(self._waiting))
            self._waiting.clear()
        else:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """The console is lost permanently."""
        self.loss = os.strerror(error.errno) if error.errno else str(error)
        name = "standard error" if self._descriptor == 2 else "standard output"
        stop = f" To stop it: {self._how_to_stop}." if self._how_to_stop else ""
        waiting, self._waiting = bytes(self._waiting), bytearray()
        self._divert()
        self._keep(
            f"note: {name} is lost ({self.loss}). The run continues, and its output continues here.{stop}\n".encode()
        )
        self._keep(waiting)

    def _divert(self) -> None:
        """Redirect the descriptor to the log, so that native libraries and child processes write there, too."""
        if self._target != self._descriptor:
            with suppress(OSError):
                os.close(self._target)
        self._target = self._descriptor
        for path in (self._log, Path(os.devnull)):
            if path is None:
                continue
            with suppress(OSError):
                file = os.open(path, _APPEND, 0o666)
                if file != self._descriptor:
                    os.dup2(file, self._descriptor)
                    os.close(file)
                else:
                    os.set_inheritable(file, True)
                return

    def _keep(self, data: bytes) -> None:
        """Write to the log. If there is none yet, keep the newest part in memory."""
        if not data:
            return
        if self._log is None:
            self._kept += data
            del self._kept[:-_MOST_WAITING_BYTES]
            return
        with suppress(OSError):
            file = os.open(self._log, _APPEND, 0o666)
            try:
                os.write(file, data)
            finally:
                os.close(file)


class _Bytes(io.RawIOBase):
    """The binary side of a stream."""

    def __init__(self, stream: SafeStream) -> None:
        super().__init__()
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        content = bytes(cast(bytes, data))
        self._stream.send_bytes(content)
        return len(content)

    def flush(self) -> None:
        self._stream.flush()


def protect_console() -> None:
    """Replace standard output and error by safe streams. Streams that were already replaced are kept."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or stream is getattr(sys, f"__{name}__"):
            if stream is not None:
                with suppress(OSError, ValueError):
                    stream.flush()
            setattr(sys, name, SafeStream(number, getattr(stream, "encoding", None) or "utf-8"))


class _PipeFile(io.FileIO):
    """A pipe whose reader may close it at any time, as `head` does. Later writes are discarded."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _discard(self.fileno())
            return memoryview(data).nbytes


def _discard(descriptor: int) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def discard_output() -> None:
    """The reader closed the pipe and this command ends. Make sure that the final flush does not fail."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            _discard(stream.fileno())


def outlive_readers() -> None:
    """A closed pipe does not end this command. Its work is completed, and its exit code does not change."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue  # closed, or replaced by the calling program
        mode = os.fstat(stream.fileno()).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            continue
        raw = _PipeFile(stream.fileno(), "w", closefd=False)
        is_unbuffered = stream.write_through  # python -u
        safe = io.TextIOWrapper(
            cast(IO[bytes], raw if is_unbuffered else io.BufferedWriter(raw)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=is_unbuffered,
        )
        setattr(sys, name, safe)


def _streams() -> list[SafeStream]:
    """The safe streams of this process, also below a live line."""
    found = [getattr(stream, "below", stream) for stream in (sys.stdout, sys.stderr)]
    return [stream for stream in found if isinstance(stream, SafeStream)]


def keep_console_in(log: Path, how_to_stop: str) -> None:
    """Set the log for output that the console does not accept."""
    for stream in _streams():
        stream.keep_in(log, how_to_stop)


def send_console_to(log: Path) -> None:
    """Redirect all output to this file, including output of native libraries."""
    finish_console()
    streams = _streams()
    for stream in streams:
        stream.send_to(log)
    for number in {1, 2} - {stream.fileno() for stream in streams}:
        file = os.open(log, _APPEND, 0o666)
        os.dup2(file, number)
        os.close(file)


def finish_console() -> None:
    """Called before the process ends. Never raises, so that the exit code does not change."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    for stream in _streams():
        stream.finish()


def describe_console_loss() -> dict[str, str]:
    """For status.json; empty while the console works."""
    loss = next((stream.loss for stream in _streams() if stream.loss is not None), None)
    return {} if loss is None else {"console": f"lost ({loss}); the output continues in the logs"}


def write_at_once(stream: object, data: bytes) -> None:
    """For signal handlers, where `print` could deadlock on its own lock."""
    stream = getattr(stream, "below", stream)
    if isinstance(stream, SafeStream):
        stream.write_at_once(data)
        return
    with suppress(OSError, ValueError, AttributeError):
        os.write(stream.fileno(), data)  # type: ignore[attr-defined]
