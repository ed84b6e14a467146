"""Reads numbers from environment variables. Wrong values are refused before anything starts."""

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
    """A finite number from 0. An empty variable counts as not set."""
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
    """Like `read_number`, for a whole number."""
    text = environment.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise _refused(name, text, "a whole number from 0")
    return int(text)


def check_numbers() -> None:
    """Check all variables at the start of a run: some are used only at its end."""
    for name in (STORAGE_PATIENCE, STORE_TIMEOUT, START_TIMEOUT):
        read_number(name, 0.0)
    read_whole(MAX_REQUEUES, 0)


def _refused(name: str, text: str, allowed: str) -> UserError:
    return UserError(f"{name} is not valid", where="the environment", got=printable_line(text[:200]), allowed=allowed)
