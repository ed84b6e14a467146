"""The settings of a benchmark, as data. Imports no torch: a wrong value is found before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from paceline.errors import UserError
from paceline.metrics.screen import UNITS, format_size
from paceline.settings.schema import Config

Part = Literal["collectives", "data", "step"]
PARTS: tuple[Part, ...] = get_args(Part)
DEFAULT_SIZES = "4KB:64MB"
_LEAST, _MOST = 4, 8 * 2**30  # bytes: one number; a large buffer
_STEP = 4


@dataclass(frozen=True)
class BenchRequest:
    recipe: str
    config: Config
    parts: tuple[Part, ...]
    sizes: tuple[int, ...]  # of messages, in bytes
    seconds_per_size: float
    profile: Path | None  # the folder for traces

    @property
    def needs_recipe(self) -> bool:
        """Whether data and model are needed."""
        return self.parts != ("collectives",) or self.profile is not None


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
