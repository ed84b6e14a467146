"""How a run counts its epochs. If new data changes the number of steps per epoch, the count continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.runs.json_files import COUNT, Fields, Number, fit

_SHAPE = Fields(
    optional={
        "steps_per_epoch": Number(1, 1e15, is_whole=True),
        "epochs_counted_from": Fields(required={"step": COUNT, "epoch": COUNT}),
    }
)


@dataclass(frozen=True)
class EpochClock:
    """Converts steps to epochs."""

    steps_per_epoch: int
    first_step: int = 0  # the start of the first epoch of this length
    first_epoch: int = 0  # epochs done before it

    def locate(self, step: int) -> tuple[int, int]:
        """Whole epochs done after this step, and the steps taken in the next one."""
        epochs, inside = divmod(step - self.first_step, self.steps_per_epoch)
        return self.first_epoch + epochs, inside

    def end_of(self, epochs: int) -> int:
        """The step at which this many epochs are complete."""
        return self.first_step + (epochs - self.first_epoch) * self.steps_per_epoch

    def at_other_length(self, step: int, steps_per_epoch: int) -> EpochClock:
        """Continue the count at this step with epochs of another length. A partial epoch keeps its position."""
        if steps_per_epoch == self.steps_per_epoch:
            return self
        epoch, inside = self.locate(step)
        return EpochClock(steps_per_epoch, step - min(inside, steps_per_epoch - 1), epoch)

    def to_json(self) -> dict[str, Any]:
        """The fields in a checkpoint's state."""
        counted_from = {"step": self.first_step, "epoch": self.first_epoch}
        return {"steps_per_epoch": self.steps_per_epoch, "epochs_counted_from": counted_from}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> EpochClock | None:
        """None if the state has no such fields. Raises ValueError for impossible values."""
        values = fit(state, _SHAPE)
        if "steps_per_epoch" not in values:
            return None
        origin = values.get("epochs_counted_from", {"step": 0, "epoch": 0})  # older versions had only one length
        return cls(int(values["steps_per_epoch"]), int(origin["step"]), int(origin["epoch"]))
