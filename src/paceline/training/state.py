"""The state of a run: everything that a resume needs and that is not a tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.runs.json_files import COUNT, MAYBE, SHARE, Fields, ListOf, MapOf, Number, fit

_SHAPE = Fields(
    required={
        "step": COUNT,
        "best_epoch": COUNT,
        "best_accuracy": (SHARE, Number(-1, -1), MAYBE),
        "best_loss": (float, MAYBE),
        "epoch_sums": Fields(
            required={"loss": float, "correct": COUNT, "samples": COUNT, "seconds": Number(0)},
            optional={"ranks": ListOf(ListOf(float))},
        ),
        "validation": (MapOf((float, MAYBE)), MAYBE),
    },
    optional={
        "best_step": COUNT,
        "best_merit": (float, MAYBE),
        "steps_per_epoch": COUNT,
        "skipped": ListOf(COUNT),
        "jumped": ListOf(COUNT),
        "recent_losses": ListOf(float),
        "audited": COUNT,
        "audits": COUNT,
    },
)


@dataclass
class EpochSums:
    """Exact sums over the samples trained on so far in this epoch, over all ranks."""

    loss: float = 0.0
    correct: int = 0
    samples: int = 0
    seconds: float = 0.0
    ranks: list[list[float]] = field(default_factory=list)  # of each rank: loss, correct, samples

    def add(self, loss: float, correct: float, samples: float) -> None:
        self.loss += loss
        self.correct += round(correct)
        self.samples += round(samples)

    def add_ranks(self, rows: list[list[float]]) -> None:
        """What each rank contributes to the sums. After a resume on another number of ranks they count from there."""
        if len(self.ranks) != len(rows):
            self.ranks = [[0.0, 0.0, 0.0] for _ in rows]
        for sums, row in zip(self.ranks, rows, strict=True):
            for column, value in enumerate(row):
                sums[column] += value

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.samples, 1)

    @property
    def accuracy(self) -> float:
        return self.correct / max(self.samples, 1)


@dataclass
class TrainState:
    """The clock is the step; epoch and position follow from it."""

    step: int = 0
    best_epoch: int = 0
    best_step: int = 0  # not computed from the epoch: epochs of other data have another length
    best_merit: float = float("-inf")  # the value of the metric that decides; negative if it is minimised
    best_accuracy: float | None = None
    best_loss: float = float("inf")
    epoch_sums: EpochSums = field(default_factory=EpochSums)
    validation: dict[str, float] | None = None  # at this very step; None inside an epoch
    is_validation_due: bool = False  # the epoch is trained; a stop came before its validation was finished
    skipped: list[int] = field(default_factory=list)  # steps (from 0) whose update was left out
    jumped: list[int] = field(default_factory=list)  # steps left out altogether after a roll-back
    recent_losses: list[float] = field(default_factory=list)  # what a spike is measured against
    audited: int = 0  # the step of the last audit that found nothing, counted from 1; 0: none
    audits: int = 0  # how many found nothing

    def is_improved_by(self, merit: float, loss: float) -> bool:
        """A better value of the metric that decides, or the same with less loss."""
        return (merit, -loss) > (self.best_merit, -self.best_loss)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        if self.best_epoch == 0:
            values["best_loss"] = values["best_merit"] = None  # JSON knows no infinity
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainState:
        """Raises ValueError for values that no run has saved."""
        values = fit(values, _SHAPE)
        loss, accuracy = values["best_loss"], values["best_accuracy"]
        accuracy = None if accuracy is None or accuracy < 0 else float(accuracy)  # older versions have -1
        merit = values.get("best_merit", accuracy)  # older versions have no other metric
        return cls(
            step=int(values["step"]),
            best_epoch=int(values["best_epoch"]),
            # Checkpoints of older versions do not have it.
            best_step=int(values.get("best_step", values["best_epoch"] * values.get("steps_per_epoch", 0))),
            best_merit=float("-inf") if merit is None else float(merit),
            best_accuracy=accuracy,
            best_loss=float("inf") if loss is None else float(loss),
            epoch_sums=EpochSums(
                **{name: values["epoch_sums"][name] for name in ("loss", "correct", "samples", "seconds")},
                ranks=_three_numbers_each(values["epoch_sums"].get("ranks", [])),
            ),
            validation=values["validation"],
            is_validation_due=bool(values.get("is_validation_due", False)),
            skipped=list(values.get("skipped", [])),
            jumped=list(values.get("jumped", [])),
            recent_losses=list(values.get("recent_losses", [])),
            audited=int(values.get("audited", 0)),
            audits=int(values.get("audits", 0)),
        )


def _three_numbers_each(rows: list[list[float]]) -> list[list[float]]:
    return rows if all(len(row) == 3 for row in rows) else []
