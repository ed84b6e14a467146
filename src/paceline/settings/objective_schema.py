"""The settings of what a run learns: loss, class weights, best metric, teacher. A group of `schema.Config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.settings.declare import Arg, Range


@dataclass(frozen=True)
class ObjectiveConfig:
    bce_threshold: Annotated[float, Range(low=0.0, high=1.0, open_high=True)] = 0.0
    """With loss bce: soft targets above this count as 1, the others as 0; 0: soft targets stay as they are."""

    focal_gamma: Annotated[float, Range(low=0.0, high=10.0)] = 2.0
    """With loss focal: how much samples that are already recognised count less; 0: not at all."""

    class_weights: tuple[str, ...] = ()
    """A weight of each class in the training loss: numbers in the order of the classes, balanced (by how rare a class
    is), or a file of numbers."""

    best_by: str = ""
    """The validation metric that selects the best checkpoint: loss, accuracy, balanced_accuracy, f1, top5, map, mae,
    rmse, or min:NAME or max:NAME of --metrics. Empty: accuracy (multi-label: map, regression: mae)."""

    teacher: Annotated[str, Arg(completes="run")] = ""
    """Distillation: a run, a checkpoint or timm:NAME whose outputs are learned too."""

    distill: Literal["soft", "hard"] = "soft"
    """soft: learn the probabilities of the teacher. hard: learn its most likely class."""

    distill_temperature: Annotated[float, Range(low=0.0, open_low=True, high=100.0)] = 1.0
    """With distill soft: divides the outputs of teacher and model before they become probabilities."""

    distill_weight: Annotated[float, Range(low=0.0, high=1.0, open_low=True)] = 0.5
    """Share of the teacher's part in the loss; the labels have the rest."""

    teacher_sha256: str = ""
    """Hash of the teacher's weights. The run fills it in and refuses a teacher with another one."""
