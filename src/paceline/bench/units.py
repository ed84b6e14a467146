"""Message sizes, times and rates: read from a flag, and written for people. Imports no torch.

Sizes count in 1024s, as buffers do; rates in 1000s, as links are sold.
"""

from __future__ import annotations

import re

from paceline.errors import UserError

DEFAULT_SIZES = "4KB:64MB"
_UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}
_LEAST, _MOST = 4, 8 * 2**30  # one number; what a buffer may reasonably take
_STEP = 4


def parse_sizes(text: str) -> tuple[int, ...]:
    """Every fourth power from the first size up to the last, which is always one of them; or one size alone."""
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
    size = int(match[1]) * _UNITS[f"{match[2].upper()}B"] if match else 0
    if not _LEAST <= size <= _MOST:
        raise UserError(
            f"sizes: {text!r} is not valid",
            where="flag --sizes",
            allowed=f"SIZE or LOW:HIGH, from {_LEAST}B up to {format_size(_MOST)}, in B, KB, MB or GB",
            hint=f"--sizes {DEFAULT_SIZES}",
        )
    return size


def format_size(size_bytes: float) -> str:
    for unit in ("GB", "MB", "KB"):
        if size_bytes >= _UNITS[unit]:
            return f"{size_bytes / _UNITS[unit]:.3g} {unit}"
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
    """A rate without its unit, for a column that names it."""
    return _three_digits(bytes_per_s / 1e9)


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
