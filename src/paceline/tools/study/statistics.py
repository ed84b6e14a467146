"""Means, intervals and ratios over a handful of repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T_AT = {20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980}
_WIDEST = 4.0  # high / low: from half of a value to twice the value; a wider interval has no use


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval. A single measurement, or a few that differ widely, have no interval."""

    value: float
    low: float | None = None
    high: float | None = None
    is_too_noisy: bool = False  # the repeats differ too much for a useful interval

    def show(self, form: str = "{:.3g}") -> str:
        text = form.format(self.value)
        if self.is_too_noisy:
            return f"{text} (too noisy for an interval: use more repeats)"
        if self.low is None or self.high is None:
            return text
        return f"{text} ({form.format(self.low)} to {form.format(self.high)})"

    def over(self, number: float) -> Estimate:
        """The same estimate in other units."""
        low, high = (None if bound is None else bound / number for bound in (self.low, self.high))
        return Estimate(self.value / number, low, high, self.is_too_noisy)


def _around(value: float, half: float) -> Estimate:
    """An estimate with an interval of this half width, in logarithms."""
    low, high = value * math.exp(-half), value * math.exp(min(half, 700.0))
    return Estimate(value, is_too_noisy=True) if high > _WIDEST * low else Estimate(value, low, high)


def student_t(degrees: float) -> float:
    """The 97.5 % quantile; between table entries the larger, more conservative one."""
    whole = max(1, math.floor(degrees))
    if whole <= len(_T):
        return _T[whole - 1]
    below = [entry for entry in _T_AT if entry <= whole]
    return _T_AT[max(below)] if below else _T[-1]


def mean(values: Sequence[float]) -> Estimate:
    """The mean of positive measurements, and its interval by Student's t of their logarithms: it stays positive."""
    middle = statistics.fmean(values)
    if len(values) < 2 or middle <= 0:
        return Estimate(middle)
    half = student_t(len(values) - 1) * statistics.stdev(values) / middle / math.sqrt(len(values))
    return _around(middle, half)


def ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """mean(above) / mean(below) of positive measurements, with Welch's interval of the logarithms."""
    value = statistics.fmean(above) / statistics.fmean(below)
    if len(above) < 2 or len(below) < 2:
        return Estimate(value)
    parts = []
    for values in (above, below):
        spread = statistics.stdev(values) / statistics.fmean(
            values
        )  # the standard deviation of the logarithm, for small spreads
        parts.append(spread**2 / len(values))
    variance = sum(parts)
    if variance == 0:
        return Estimate(value, value, value)
    freedom = variance**2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (above, below), strict=True) if p)
    half = student_t(freedom) * math.sqrt(variance)
    return _around(value, half)


def serial_fraction(speedups: dict[int, float]) -> float | None:
    """Amdahl's serial fraction: the part of the work that more ranks do not speed up. Fitted to all sizes above one."""
    pairs = [(size, speedup) for size, speedup in speedups.items() if size > 1 and speedup > 0]
    if not pairs:
        return None
    # 1/S = f + (1 - f)/n is a line in f; least squares.
    top = sum((1 / s - 1 / n) * (1 - 1 / n) for n, s in pairs)
    bottom = sum((1 - 1 / n) ** 2 for n, _ in pairs)
    return top / bottom


def scaled_serial_fraction(speedups: dict[int, float]) -> float | None:
    """Gustafson's serial fraction, for work that grows with the ranks: S = n - f (n - 1)."""
    pairs = [(size, speedup) for size, speedup in speedups.items() if size > 1]
    if not pairs:
        return None
    top = sum((n - s) * (n - 1) for n, s in pairs)
    return top / sum((n - 1) ** 2 for n, _ in pairs)
