"""The settings of a benchmark, as data. Imports no torch: a wrong value is found before anything starts."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.settings.schema import Config

PARTS = ("collectives", "data", "step")
_LEAST_S, _MOST_S = 0.01, 60.0


@dataclass(frozen=True)
class Request:
    recipe: str
    config: Config
    parts: tuple[str, ...]
    sizes: tuple[int, ...]  # of messages, in bytes
    seconds_per_size: float
    profile: Path | None  # the folder for traces

    @property
    def needs_recipe(self) -> bool:
        """Whether data and model are needed."""
        return self.parts != ("collectives",) or self.profile is not None


def parse_parts(text: str) -> tuple[str, ...]:
    """The parts in a fixed order."""
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in PARTS]
    if unknown:
        raise UserError(
            f"bench has no part {unknown[0]!r}",
            where="flag --what",
            got=text,
            allowed=", ".join(PARTS),
            hint=f"--what {','.join(PARTS)}",
        )
    return tuple(part for part in PARTS if part in words)


def parse_seconds(text: str) -> float:
    with suppress(ValueError):
        seconds = float(text)
        if math.isfinite(seconds) and _LEAST_S <= seconds <= _MOST_S:
            return seconds
    raise UserError(
        f"seconds_per_size: {text!r} is not valid",
        where="flag --seconds-per-size",
        allowed=f"a number from {_LEAST_S:g} up to {_MOST_S:g}",
    )
