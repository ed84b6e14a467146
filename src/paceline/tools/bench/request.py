"""The settings of a benchmark, as data. Imports no torch: a wrong value is found before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from paceline.settings.schema import Config

Part = Literal["collectives", "data", "step"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Request:
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
