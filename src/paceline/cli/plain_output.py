"""Standard output of the commands that show what files say: no control character of a file reaches the terminal.

Run folders, notes and logs may come from any user. An escape sequence in them could rewrite what is on the screen, or
type into the shell. The commands that draw (train, bench, study, doctor, ...) print their own text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from paceline.errors import printable
from paceline.metrics.screen import COLOUR_CODES, is_live

_DRAWING_VERBS = ("train", "bench", "study", "sweep", "doctor", "course", "equivalence", "data", "plan")
_OWN_COLOURS = re.compile(r"(\x1b\[(?:" + "|".join(COLOUR_CODES) + ")m)")


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
def plain_output(verb: str) -> Iterator[None]:
    """Filter standard output and error while such a command runs."""
    if verb in _DRAWING_VERBS:
        yield
        return
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, PlainStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unfiltered(stream: TextIO) -> TextIO:
    """For what moves the cursor itself, and prints text that was made printable before."""
    return stream.unfiltered if isinstance(stream, PlainStream) else stream
