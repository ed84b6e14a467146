"""Format sizes, times and rates for people. Does not import torch.

Sizes use factors of 1024, as buffers do. Rates use factors of 1000, as link speeds do.
"""

from __future__ import annotations

UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


def format_size(size_bytes: float) -> str:
    for unit in ("GB", "MB", "KB"):
        if size_bytes >= UNITS[unit]:
            return f"{size_bytes / UNITS[unit]:.3g} {unit}"
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
    """A rate without its unit, for a column with the unit in its heading."""
    return _three_digits(bytes_per_s / 1e9)


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
