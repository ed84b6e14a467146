"""Loss and gradient norm of every step, with all their bits: `steps.f64`. They let a single step be checked later.

A step has 16 bytes: two little-endian float64. A step that is left out has NaN. Both numbers are on the host in every
step anyway, so the record takes no time.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

from paceline.runs.json_files import LARGEST_LINES_BYTES, read_bounded
from paceline.settings.small_files import open_plain

_STEP = struct.Struct("<dd")
UNKNOWN = (-1.0, -1.0)  # of a step that was not recorded; no gradient has such a norm
LEFT_OUT = (math.nan, math.nan)
Numbers = tuple[float, float]


class StepTrace:
    """Appends the numbers of steps. They are kept in memory until `write`."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self._path = path
        self._first = resume_step  # the step before the first one in memory
        self._waiting = b""
        with open(path, "ab", opener=open_plain) as file:
            known = min(os.fstat(file.fileno()).st_size // _STEP.size, resume_step)
            file.truncate(known * _STEP.size)
            file.write(_STEP.pack(*UNKNOWN) * (resume_step - known))

    def add(self, numbers: Numbers) -> None:
        self._waiting += _STEP.pack(*numbers)

    def write(self) -> None:
        """All of it, or nothing: on a full disk the numbers stay in memory."""
        if not self._waiting:
            return
        descriptor = open_plain(self._path, os.O_WRONLY)
        try:
            os.lseek(descriptor, self._first * _STEP.size, os.SEEK_SET)
            if os.write(descriptor, self._waiting) == len(self._waiting):
                self._first += len(self._waiting) // _STEP.size
                self._waiting = b""
        finally:
            os.close(descriptor)


def read_trace(path: Path) -> list[Numbers]:
    """The numbers of each step, from the first one on. Empty if there is no record."""
    try:
        content = read_bounded(path, LARGEST_LINES_BYTES)
    except (OSError, ValueError):
        return []
    return list(_STEP.iter_unpack(content[: len(content) // _STEP.size * _STEP.size]))
