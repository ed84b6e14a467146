"""How words reach a person: around a live line on a terminal, as plain lines everywhere else.

A live line is written and the cursor goes back to its beginning. So whoever speaks next - this process, a supervisor
after this process was killed, a terminal that has folded the line in two - only has to erase from the cursor on.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any, TextIO, cast

from paceline.errors import printable
from paceline.metrics.safe_output import write_at_once

OUTPUT = "PACELINE_OUTPUT"  # quiet or json: what `paceline train` was asked for, for the ranks it starts
BRIEF = "brief"  # a value of it: a line per epoch, at most about ten; for the logs of other programs' tasks
ERASE = "\r\x1b[J"
# Between these a line that is too wide is cut by the terminal: for a moment after a window has become narrower the
# system still tells its old width.
UNFOLDED, FOLDED = "\x1b[?7l", "\x1b[?7h"
_COLOURS = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}
COLOUR_CODES = (*_COLOURS.values(), "0")
_TICK_S = 1.0  # a clock goes on, and a resized window is noticed, without a new step
_LABEL = re.compile(r"(\s*\w+:?\s{2,})\S")  # "data      shapes: ..."


def output_mode() -> str:
    """quiet, json, brief, or empty: as usual."""
    return os.environ.get(OUTPUT, "")


def speech() -> TextIO:
    """Where the story of a run is told; standard output is for rows where somebody asked for rows."""
    return sys.stderr if output_mode() == "json" else sys.stdout


def say(text: str) -> None:
    """One line of the story, from whoever is not the console."""
    if output_mode() != "quiet":
        write_line(text, speech())


def write_line(text: str, stream: TextIO) -> None:
    """In one piece: killed in between, a rank would leave a line without its end, and the next would begin in it."""
    stream.write(text + "\n")
    stream.flush()


def is_live(stream: TextIO) -> bool:
    """Whether lines may be rewritten: on a terminal that can, and that no machine reads along."""
    is_plain = os.environ.get("TERM", "dumb") == "dumb" or os.environ.get("CI", "").lower() not in ("", "0", "false")
    return not is_plain and stream.isatty()


def paint(text: str, colour: str | None, stream: TextIO) -> str:
    """In colour where that can be seen and is wanted (https://no-color.org)."""
    if colour is None or os.environ.get("NO_COLOR") or not is_live(stream):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def width_of(stream: TextIO) -> int:
    """Columns of the terminal behind a stream, asked anew each time: windows are resized."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def can_show(text: str, stream: TextIO) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def fold(text: str, width: int) -> str:
    """A line that is too wide, broken between words, the rest indented under its own text. Paths stay whole."""
    if len(text) < width or width < 20:
        return text
    label = _LABEL.match(text)
    indent = " " * (len(label[1]) if label else len(text) - len(text.lstrip()) + 2)
    head = label[1] if label else text[: len(text) - len(text.lstrip())]
    lines = textwrap.wrap(
        text[len(head) :],
        width - 1,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def fit_to(stream: TextIO, text: str) -> str:
    """Lines as they look best there: folded on a terminal, left alone for grep."""
    if not is_live(stream):
        return text
    return "\n".join(fold(line, width_of(stream)) for line in text.split("\n"))


def in_words_s(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.0f} days"


def erase_live_line() -> None:
    """Before a supervisor speaks: its ranks may just have drawn one, and been killed. Safe in a signal handler."""
    stream = speech()
    if output_mode() != "quiet" and is_live(stream):
        write_at_once(stream, ERASE.encode())


class LiveLine:
    """One line at the bottom of a terminal, renewed in place. Whatever is printed meanwhile appears above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._compose: Callable[[int], str] = lambda width: ""
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="live-line", daemon=True)
        self._replaced = (sys.stdout, sys.stderr)

    def start(self, compose: Callable[[int], str]) -> None:
        """`compose` makes the line for a width."""
        self._compose = compose
        self._replaced = (sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = (cast(TextIO, _Above(self, stream)) for stream in self._replaced)
        self.draw()
        self._ticker.start()

    def draw(self) -> None:
        with self._lock:
            if not self._stream.isatty() or getattr(self._stream, "is_slow", False):
                return  # the terminal is gone, or takes nothing at the moment
            self._stream.write(ERASE + UNFOLDED + self._compose(width_of(self._stream) - 1) + FOLDED + "\r")
            self._stream.flush()

    def above(self, text: str, stream: TextIO) -> None:
        """Print whole lines above the live one; `stream` may be another file, or another door to this terminal."""
        with self._lock:
            if stream.isatty():
                self._stream.write(ERASE)
                self._stream.flush()
            stream.write(text + "\n")
            stream.flush()
            if not self._over.is_set():
                self.draw()

    def stop(self) -> None:
        self._over.set()
        self._ticker.join()
        with self._lock:
            for name, original in zip(("stdout", "stderr"), self._replaced, strict=True):
                stream = getattr(sys, name)
                if isinstance(stream, _Above):
                    stream.let_go()
                    setattr(sys, name, original)
            if self._stream.isatty():
                self._stream.write(ERASE)
                self._stream.flush()

    def _tick(self) -> None:
        while not self._over.wait(_TICK_S):
            self.draw()


class _Above:
    """Stands in for standard output and error while a live line is shown. Lines pass when they are whole."""

    def __init__(self, line: LiveLine, stream: TextIO) -> None:
        self._line = line
        self._stream = stream
        self._begun = ""

    @property
    def below(self) -> TextIO:
        """The stream that this one stands in for."""
        return self._stream

    def write(self, text: str) -> int:
        whole, has_end, rest = (self._begun + text).rpartition("\n")
        self._begun = rest
        if has_end:
            self._line.above(whole, self._stream)
        return len(text)

    def flush(self) -> None:
        """What has no end yet waits for it."""

    def let_go(self) -> None:
        if self._begun:
            self._line.above(self._begun, self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def pass_on(text: str, stream: TextIO | None) -> bool:
    """Print what another process said; False if this stream takes nothing any more, which must not end the other."""
    try:
        print(text, end="", file=stream, flush=True)
    except (OSError, ValueError):
        return False
    return True


ONLY_IN_LOG = {"is_only_in_log": True}  # for `extra=`: a record that is not for the screen


class ScreenLog(logging.Handler):
    """The primary's notes and warnings on the screen. Errors are left to the screen that explains the end."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_only_in_log", False):
            return
        is_warning = record.levelno >= logging.WARNING
        if record.levelno >= logging.ERROR or (output_mode() == "quiet" and not is_warning):
            return
        # Asked to be quiet, standard output has one line, which scripts take.
        stream = sys.stderr if output_mode() == "quiet" else speech()
        try:
            text = printable(self.format(record))  # names of files are part of some
            write_line(paint(text, "yellow" if is_warning else None, stream), stream)
        except Exception:  # a closed pipe, a full disk: logging's own way to tell, which never raises
            self.handleError(record)
