"""Message sizes, read from a flag. Imports no torch."""

from __future__ import annotations

import re

from paceline.errors import UserError
from paceline.metrics.units import UNITS, format_size

DEFAULT_SIZES = "4KB:64MB"
_LEAST, _MOST = 4, 8 * 2**30  # bytes: one number; a large buffer
_STEP = 4


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes from the first to the last, each four times the one before; the last is always included. Or one size."""
    low_text, is_range, high_text = text.partition(":")
    low = _parse_size(low_text, text)
    high = _parse_size(high_text, text) if is_range else low
    if low > high:
        raise UserError(
            "the range of sizes is reversed", where="flag --sizes", got=text, hint=f"--sizes {high_text}:{low_text}"
        )
    sizes, size = [], low
    while size < high:
        sizes.append(size)
        size *= _STEP
    return (*sizes, high)


def _parse_size(word: str, text: str) -> int:
    match = re.fullmatch(r"(\d{1,12})\s*([KMG]?)(?:I?B)?", word.strip(), re.IGNORECASE)
    size = int(match[1]) * UNITS[f"{match[2].upper()}B"] if match else 0
    if not _LEAST <= size <= _MOST:
        raise UserError(
            f"sizes: {text!r} is not valid",
            where="flag --sizes",
            allowed=f"SIZE or LOW:HIGH, from {_LEAST}B up to {format_size(_MOST)}, in B, KB, MB or GB",
            hint=f"--sizes {DEFAULT_SIZES}",
        )
    return size
