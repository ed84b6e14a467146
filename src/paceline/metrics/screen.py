"""Console output: around a live line on a terminal, as plain lines everywhere else.

After the live line is written, the cursor returns to its beginning. The next writer (this process, or the supervisor
after this process was killed) only has to erase from the cursor on. This also works if the terminal wrapped the line.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from paceline.errors import printable
from paceline.metrics.safe_output import write_at_once

OUTPUT = "PACELINE_OUTPUT"  # quiet or json: passes the flag of `paceline train` to its ranks
BRIEF = "brief"  # a value of OUTPUT: at most about ten epoch lines, for task logs of other programs
NO_FIGURES = "no-figures"  # a value of OUTPUT: no lines of steps and epochs, because a notebook shows them as a table
ERASE = "\r\x1b[J"
# Between these codes the terminal cuts a line that is too wide. Right after a window became narrower, the system still
# reports the old width.
UNFOLDED, FOLDED = "\x1b[?7l", "\x1b[?7h"
_COLOURS = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}
COLOUR_CODES = (*_COLOURS.values(), "0")
_TICK_S = 1.0  # update clocks and notice a resized window also without a new step
_LABEL = re.compile(r"(\s*\w+:?\s{2,})\S")  # "data      shapes: ..."
_OWN_COLOURS = re.compile(r"(\x1b\[(?:" + "|".join(COLOUR_CODES) + ")m)")
UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


def output_mode() -> str:
    """quiet, json, brief, no-figures, or empty for normal output."""
    return os.environ.get(OUTPUT, "")


def message_stream() -> TextIO:
    """The stream for messages: standard output, but standard error if standard output has JSON rows.

    A model may set them to None in its forward pass. Python keeps the first ones.
    """
    stream: TextIO | None = sys.stderr if output_mode() == "json" else sys.stdout
    return stream or cast(TextIO, sys.__stdout__)


def say(text: str) -> None:
    """Print a message without a Console object."""
    if output_mode() != "quiet":
        write_line(text, message_stream())


def write_line(text: str, stream: TextIO) -> None:
    """Write a line in one call. If a rank is killed, no partial line is left."""
    stream.write(text + "\n")
    stream.flush()


def is_live(stream: TextIO) -> bool:
    """Whether lines may be rewritten: only on a capable terminal, and not in CI."""
    is_plain = os.environ.get("TERM", "dumb") == "dumb" or os.environ.get("CI", "").lower() not in ("", "0", "false")
    return not is_plain and stream.isatty()


def paint(text: str, colour: str | None, stream: TextIO) -> str:
    """Add colour if the terminal supports it and NO_COLOR is not set (https://no-color.org)."""
    if colour is None or os.environ.get("NO_COLOR") or not is_live(stream):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def width_of(stream: TextIO) -> int:
    """The current columns of the terminal behind a stream. Windows can be resized."""
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
    """Wrap a line that is too wide between words, with a hanging indent. Paths are not broken."""
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
    """Wrap lines on a terminal. Elsewhere leave them unchanged, for grep."""
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
    """Erase a live line that a killed rank has left, before the supervisor prints. Safe in a signal handler."""
    stream = message_stream()
    if output_mode() != "quiet" and is_live(stream):
        write_at_once(stream, ERASE.encode())


class LiveLine:
    """One line at the bottom of a terminal, rewritten in place. All other output appears above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._compose: Callable[[int], str] = lambda width: ""
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="live-line", daemon=True)
        self._replaced = (sys.stdout, sys.stderr)

    def start(self, compose: Callable[[int], str]) -> None:
        """`compose` returns the line for a width."""
        self._compose = compose
        self._replaced = (sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = (cast(TextIO, _Above(self, stream)) for stream in self._replaced)
        self.draw()
        self._ticker.start()

    def draw(self) -> None:
        with self._lock:
            if not self._stream.isatty() or getattr(self._stream, "is_slow", False):
                return  # the terminal is closed, or not reading
            self._stream.write(ERASE + UNFOLDED + self._compose(width_of(self._stream) - 1) + FOLDED + "\r")
            self._stream.flush()

    def above(self, text: str, stream: TextIO) -> None:
        """Print complete lines above the live line. `stream` may be another file, or stderr on the same terminal."""
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
                    stream.write_rest()
                    setattr(sys, name, original)
            if self._stream.isatty():
                self._stream.write(ERASE)
                self._stream.flush()

    def _tick(self) -> None:
        while not self._over.wait(_TICK_S):
            self.draw()


class _Above:
    """Replaces standard output or error while a live line is shown. Writes only complete lines."""

    def __init__(self, line: LiveLine, stream: TextIO) -> None:
        self._line = line
        self._stream = stream
        self._begun = ""

    @property
    def below(self) -> TextIO:
        """The stream that this one replaces."""
        return self._stream

    def write(self, text: str) -> int:
        whole, has_end, rest = (self._begun + text).rpartition("\n")
        self._begun = rest
        if has_end:
            self._line.above(whole, self._stream)
        return len(text)

    def flush(self) -> None:
        """Nothing to do: an incomplete line waits for its end."""

    def write_rest(self) -> None:
        if self._begun:
            self._line.above(self._begun, self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def pass_on(text: str, stream: TextIO | None) -> bool:
    """Print the output of a child process. Returns False on a write error, so that the child is not ended."""
    try:
        print(text, end="", file=stream, flush=True)
    except (OSError, ValueError):
        return False
    return True


ONLY_IN_LOG = {"is_only_in_log": True}  # for `extra=`: a record that is not for the screen


class ScreenLog(logging.Handler):
    """Prints notes and warnings of the primary rank. Errors are skipped: the error screen shows them."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_only_in_log", False):
            return
        is_warning = record.levelno >= logging.WARNING
        if record.levelno >= logging.ERROR or (output_mode() == "quiet" and not is_warning):
            return
        # Under --quiet, standard output has only the result line, for scripts.
        stream = sys.stderr if output_mode() == "quiet" else message_stream()
        try:
            text = printable(self.format(record))  # a message may contain a file name with control characters
            write_line(paint(text, "yellow" if is_warning else None, stream), stream)
        except Exception:  # a closed pipe or a full disk; handleError never raises
            self.handleError(record)


# Standard output of the commands that show what files say: no control character of a file reaches the terminal.
#
# Run folders, notes and logs may come from any user. An escape sequence in them could rewrite what is on the screen, or
# type into the shell. The commands that draw (train, bench, study, doctor, ...) print their own text.


class PlainStream:
    """A text stream that passes printable text, newlines, tabs and, on a terminal, our own few colours."""

    def __init__(self, stream: TextIO) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        parts = _OWN_COLOURS.split(text) if is_live(self.unfiltered) else [text]
        # Every second part is a colour of ours.
        self.unfiltered.write("".join(part if n % 2 else printable(part) for n, part in enumerate(parts)))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextmanager
def plain_output() -> Iterator[None]:
    """Filter standard output and error in this block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, PlainStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unfiltered(stream: TextIO) -> TextIO:
    """For what moves the cursor itself, and prints text that was made printable before."""
    return stream.unfiltered if isinstance(stream, PlainStream) else stream


# Format sizes, times and rates for people. Does not import torch.
#
# Sizes use factors of 1024, as buffers do. Rates use factors of 1000, as link speeds do.


def format_size(size_bytes: float) -> str:
    for unit in ("GB", "MB", "KB"):
        if size_bytes >= UNITS[unit]:
            return f"{size_bytes / UNITS[unit]:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def format_time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def format_rate(bytes_per_s: float) -> str:
    return f"{_three_digits(bytes_per_s / 1e9)} GB/s"


def format_flops(flops_per_s: float) -> str:
    if flops_per_s >= 1e12:
        return f"{_three_digits(flops_per_s / 1e12)} TFLOP/s"
    return f"{_three_digits(flops_per_s / 1e9)} GFLOP/s"


def gigabytes(bytes_per_s: float) -> str:
    """A rate without its unit, for a column with the unit in its heading."""
    return _three_digits(bytes_per_s / 1e9)


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
