"""Numbers from the environment: read in one place, and refused before anything starts if they are none."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from paceline.errors import UserError, printable_line

STORAGE_PATIENCE = "PACELINE_STORAGE_PATIENCE_S"
STORE_TIMEOUT = "PACELINE_STORE_TIMEOUT_S"
START_TIMEOUT = "PACELINE_START_TIMEOUT_S"
MAX_REQUEUES = "PACELINE_MAX_REQUEUES"


def read_number(name: str, default: float, environment: Mapping[str, str] = os.environ) -> float:
    """A finite number from 0. An empty variable counts as one that is not set."""
    text = environment.get(name, "")
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise _refused(name, text, "a number from 0")
    return number


def read_whole(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    """The same for a count."""
    text = environment.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise _refused(name, text, "a whole number from 0")
    return int(text)


def check_numbers() -> None:
    """Some are read only at the end of a run: a wrong one is refused at its start."""
    for name in (STORAGE_PATIENCE, STORE_TIMEOUT, START_TIMEOUT):
        read_number(name, 0.0)
    read_whole(MAX_REQUEUES, 0)


def _refused(name: str, text: str, allowed: str) -> UserError:
    return UserError(f"{name} is not valid", where="the environment", got=printable_line(text[:200]), allowed=allowed)
