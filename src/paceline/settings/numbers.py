"""Kinds of numbers that settings use, with their ranges."""

from __future__ import annotations

from typing import Annotated

from paceline.settings.declare import Range

Count = Annotated[int, Range(low=0)]
Positive = Annotated[int, Range(low=1)]
NonNegative = Annotated[float, Range(low=0.0)]
Fraction = Annotated[float, Range(low=0.0, high=1.0, open_high=True)]
Probability = Annotated[float, Range(low=0.0, high=1.0)]
Share = Annotated[float, Range(low=0.0, high=1.0, open_low=True)]
Factor = Annotated[float, Range(low=0.0, open_low=True)]
# Of Beta(alpha, alpha). Further out, every weight is 0, 1 or 1/2.
Alpha = Annotated[float, Range(low=0.001, high=100.0, or_zero=True)]
Seconds = Annotated[float, Range(low=0.0, high=1e9)]
