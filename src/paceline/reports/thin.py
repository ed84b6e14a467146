"""Reduces the points of long curves to what a screen can show, and keeps all peaks."""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.reports.charts import Series

MOST_POINTS = 1500
_KEPT_PER_BUCKET = 3  # its lowest, its highest, and a gap


def thin(series: Series, most_points: int = MOST_POINTS) -> Series:
    """The same curve with at most `most_points` points: the lowest and highest of each section, and the ends."""
    count = len(series.y)
    if count <= most_points:
        return series
    size = math.ceil((count - 2) / max((most_points - 2) // _KEPT_PER_BUCKET, 1))
    kept = {0, count - 1}
    for start in range(1, count - 1, size):
        kept.update(_extremes(series, range(start, min(start + size, count - 1))))
    order = sorted(kept)
    xs = series.x or range(1, count + 1)
    return replace(
        series,
        x=[xs[i] for i in order],
        y=[series.y[i] for i in order],
        low=[series.low[i] for i in order] if series.low else (),
        high=[series.high[i] for i in order] if series.high else (),
    )


def _extremes(series: Series, bucket: range) -> set[int]:
    numbers = {i: value for i in bucket if (value := series.y[i]) is not None and math.isfinite(value)}
    gap = next((i for i in bucket if i not in numbers), None)
    kept = {gap} if gap is not None else set()
    return kept | ({min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__)} if numbers else set())
