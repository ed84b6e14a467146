"""What a tracker looks like to the recorder."""

from __future__ import annotations

from typing import Any, Protocol


class Sink(Protocol):
    """Receives every metrics row as it is recorded."""

    def write(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def scalars_of(row: dict[str, Any]) -> dict[str, float]:
    """A row's numbers under the names trackers show: `train/loss`, `step/lr`."""
    prefix = row["phase"] if row["kind"] == "epoch" else "step"
    skipped = ("kind", "step", "epoch", "phase", "time")
    return {f"{prefix}/{name}": value for name, value in row.items() if name not in skipped and value is not None}
