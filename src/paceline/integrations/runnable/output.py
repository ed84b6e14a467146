"""What of a pipeline reaches the screen. Runnable prints about four hundred lines of its own for a run.

PACELINE_OUTPUT=brief: the steps' own lines, and none per training step. quiet: the result, or the error. What is kept
from the screen is in the run folder's `pipeline.log`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from paceline.metrics.screen import BRIEF, output_mode, pass_on

_PER_STEP = re.compile(r"step \d+/\d+ ")
_screen: TextIO | None = None  # where standard output led before
_begun = ""  # of a line that has no end yet


def tell(text: str, end: str = "\n") -> None:
    """Words of a step, for the person at the screen as well."""
    print(text, end=end, flush=True)
    show(text + end)


def show(text: str) -> None:
    """On the screen, if standard output does not lead there now and the person wants more than the result."""
    global _begun
    if _screen is None or output_mode() != BRIEF:
        return
    *lines, _begun = (_begun + text).split("\n")
    pass_on("".join(f"{line}\n" for line in lines if line and not _PER_STEP.match(line)), _screen)


@contextmanager
def only_own_words(find_folder: Callable[[], Path]) -> Iterator[None]:
    """In brief and quiet, everything that this process and its children print meanwhile goes to a file."""
    global _screen
    if output_mode() not in (BRIEF, "quiet"):
        yield
        return
    kept = {number: os.dup(number) for number in (1, 2)}
    with tempfile.TemporaryFile() as hidden, os.fdopen(kept[1], "w", encoding="utf-8") as _screen:
        try:
            _lead_to({1: hidden.fileno(), 2: hidden.fileno()})
            yield
        finally:
            _lead_to(kept)
            os.close(kept[2])
            _save(hidden.fileno(), find_folder())
            _screen = None


def _lead_to(files: dict[int, int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for number, file in files.items():
        os.dup2(file, number)


def _save(hidden: int, folder: Path) -> None:
    """Beside the run, after what earlier starts have said. Runnable may have named the run only just now."""
    if not folder.is_dir():  # the pipeline was only compiled, or ended before its first step
        return
    os.lseek(hidden, 0, os.SEEK_SET)
    with os.fdopen(os.dup(hidden), "rb") as source, (folder / "pipeline.log").open("ab") as log:
        shutil.copyfileobj(source, log)
