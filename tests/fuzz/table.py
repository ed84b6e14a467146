"""Every format that is fuzzed."""

from __future__ import annotations

from fuzz import run_formats
from fuzz.sandbox import Format

FORMATS: tuple[Format, ...] = (*run_formats.FORMATS,)
