"""Reads numbers from environment variables, with the same conversion as other settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from paceline.settings.declare import FieldSpec, Range
from paceline.settings.values import Setting, convert

STORAGE_PATIENCE = "PACELINE_STORAGE_PATIENCE_S"
STORE_TIMEOUT = "PACELINE_STORE_TIMEOUT_S"
START_TIMEOUT = "PACELINE_START_TIMEOUT_S"
MAX_REQUEUES = "PACELINE_MAX_REQUEUES"
_FROM_ZERO = Range(low=0)
_WHOLE = Range(low=0, high=10**9)


def read_number(name: str, default: float, environment: Mapping[str, str] = os.environ) -> float:
    """A finite number from 0. An empty variable counts as not set."""
    return float(_read(name, float, _FROM_ZERO, default, environment))


def read_whole(name: str, default: int, environment: Mapping[str, str] = os.environ) -> int:
    """Like `read_number`, for a whole number."""
    return int(_read(name, int, _WHOLE, default, environment))


def _read(name: str, kind: type, allowed: Range, default: float, environment: Mapping[str, str]) -> Any:
    text = environment.get(name, "")
    field = FieldSpec(name, name, object, "", kind, default, "", allowed)
    return convert(Setting(field, (text,), "environment", f"environment variable {name}")) if text else default


def check_numbers() -> None:
    """Check all variables at the start of a run: some are used only at its end."""
    for name in (STORAGE_PATIENCE, STORE_TIMEOUT, START_TIMEOUT):
        read_number(name, 0.0)
    read_whole(MAX_REQUEUES, 0)
