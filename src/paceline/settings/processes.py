"""`--processes`: a number of local ranks, or a range MIN:MAX from which a restart may choose."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import UserError

_MOST = 1024


@dataclass(frozen=True)
class ProcessRange:
    """0 to 0 means: as many as fit on this machine."""

    low: int
    high: int

    @property
    def is_open(self) -> bool:
        """Whether the machine decides."""
        return self.high == 0

    def holds(self, number: int) -> bool:
        return self.is_open or self.low <= number <= self.high


def parse_processes(text: str, where: str = "flag --processes") -> ProcessRange:
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text.strip())
    low = int(match[1]) if match else -1
    high = int(match[2]) if match and match[2] is not None else low
    is_range = match is not None and match[2] is not None
    if match is None or high > _MOST or (is_range and not 1 <= low <= high):
        raise UserError(
            f"processes: {text!r} is not valid",
            where=where,
            allowed=f"a whole number from 0 up to {_MOST}, or MIN:MAX such as 2:4",
        )
    return ProcessRange(low, high)
