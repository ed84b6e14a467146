"""What a verification has found, link by link. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["proved", "different", "not proved"]
_MOST_LINES = 4


@dataclass(frozen=True)
class Finding:
    kind: Kind
    what: str  # a link of the receipt, or: chain, signature, steps, weights
    text: str


@dataclass
class Findings:
    """The list grows in the order of the checks."""

    found: list[Finding] = field(default_factory=list)

    def add(self, kind: Kind, what: str, text: str) -> None:
        self.found.append(Finding(kind, what, text))

    def compare(self, what: str, recorded: dict[str, Any], now: dict[str, Any], same: str) -> bool:
        """Compare flat objects. `same`: what is proved if they are equal. Returns whether they are."""
        names = [name for name in {**recorded, **now} if recorded.get(name) != now.get(name)]
        if not names:
            self.add("proved", what, same)
            return True
        lines = [f"{name}: {_short(recorded.get(name))} in the receipt, {_short(now.get(name))} now" for name in names]
        more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        self.add("different", what, "\n".join([*lines[:_MOST_LINES], *more]))
        return False

    @property
    def is_different(self) -> bool:
        return any(finding.kind == "different" for finding in self.found)

    def of(self, kind: Kind) -> list[Finding]:
        return [finding for finding in self.found if finding.kind == kind]


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    is_hash = len(text) == 64 and all(digit in "0123456789abcdef" for digit in text)
    return text[:12] if is_hash else text[:60]
