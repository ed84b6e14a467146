"""Every format that is fuzzed."""

from __future__ import annotations

from fuzz import (
    archive_formats,
    checkpoint_formats,
    data_formats,
    message_formats,
    ownership_formats,
    run_formats,
    store_formats,
    text_formats,
)
from fuzz.sandbox import Format

FORMATS: tuple[Format, ...] = (
    *run_formats.FORMATS,
    *ownership_formats.FORMATS,
    *checkpoint_formats.FORMATS,
    *store_formats.FORMATS,
    *text_formats.FORMATS,
    *data_formats.FORMATS,
    *archive_formats.FORMATS,
    *message_formats.FORMATS,
)
