"""Injects faults, for tests and for demonstration: `--inject "slow rank=1"`. Imports no torch.

Only faults that cannot be caused on a healthy machine. docs/guides/doctor.md explains how to cause the others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from paceline.errors import UserError

KINDS = {
    "clock": "the rank's clock is 100 s ahead",
    "slow": "the rank takes three times as long for every piece of work",
    "wrong": "one bit of the rank's numbers is flipped",
    "versions": "the rank reports another version of torch",
}
_CLOCK_S = 100.0
_WRONG_VERSION = "0.0.0"


@dataclass(frozen=True)
class Plant:
    kind: str
    rank: int = 0


class Planted:
    """The injected faults of this rank, and how often each took effect."""

    def __init__(self, plants: tuple[Plant, ...] = (), rank: int = 0) -> None:
        self._kinds = {plant.kind for plant in plants if plant.rank == rank}
        self.struck = dict.fromkeys(sorted(self._kinds), 0)

    def _strikes(self, kind: str) -> bool:
        if kind in self._kinds:
            self.struck[kind] += 1
        return kind in self._kinds

    def wall_clock(self) -> float:
        """Seconds since 1970, wrong if the clock fault is injected."""
        return time.time() + (_CLOCK_S if self._strikes("clock") else 0.0)

    def version(self, true: str) -> str:
        return _WRONG_VERSION if self._strikes("versions") else true

    def burn(self, seconds: float) -> None:
        """Call after a piece of work that took this long."""
        if self._strikes("slow"):
            until = time.perf_counter() + 2 * seconds
            while time.perf_counter() < until:
                pass

    def flips_a_bit(self) -> bool:
        return self._strikes("wrong")


def parse_plants(text: str, where: str = "flag --inject") -> tuple[Plant, ...]:
    return tuple(_parse_plant(part.strip(), where) for part in text.split(";") if part.strip())


def _parse_plant(text: str, where: str) -> Plant:
    kind, *settings = text.split()
    if kind not in KINDS:
        raise UserError(f"unknown fault {kind!r}", where=where, got=text, allowed=", ".join(KINDS))
    rank = 0
    for setting in settings:
        name, _, value = setting.partition("=")
        if name != "rank" or not value.isdecimal():
            raise UserError(f"unknown setting {setting!r} of the fault {kind}", where=where, got=text, allowed="rank=N")
        rank = int(value)
    return Plant(kind, rank)
