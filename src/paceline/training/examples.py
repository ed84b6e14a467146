"""A few test pictures with their predictions, for the run's page: the most confident errors, and some correct ones.

They are collected during the test, from some batches of the primary's share. No rank waits for another.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.data.augment import Pipeline, build_pipeline
from paceline.data.preview import as_png, to_image, to_pixels
from paceline.reports.page import picture_source
from paceline.runs.folder import RunFolder, write_atomically
from paceline.runtime.detect import World
from paceline.settings.tasks import SINGLE_LABEL

if TYPE_CHECKING:  # components.py imports this file by way of the teacher, which is a finished run
    from paceline.training.components import Components

MOST_EXAMPLES = 24
_MOST_WRONG = 16
_MOST_BATCHES = 8
_LARGEST_SIDE = 96  # pixels; a page has many pictures


@dataclass(frozen=True)
class Example:
    picture: Tensor  # uint8 [C, H, W]
    true: int
    predicted: int
    confidence: float


class Examples:
    """Collects pictures during the test."""

    def __init__(self, pipeline: Pipeline, num_batches: int) -> None:
        self._pipeline = pipeline
        self._every = math.ceil(num_batches / _MOST_BATCHES) or 1
        self._seen = 0
        self._found: list[Example] = []

    def collect(self, inputs: Tensor, labels: Tensor, logits: Tensor) -> None:
        """Called for each evaluated batch. Reads values from the device in a few batches only."""
        self._seen += 1
        channels = inputs.shape[1] if inputs.dim() == 4 else 0
        # Floats are not pictures: their black and white are not known.
        if channels not in (1, 3) or not self._pipeline.mean or (self._seen - 1) % self._every:
            return
        confidences, predictions = (column.tolist() for column in logits.softmax(1).max(1))
        truths = labels.tolist()
        answers = list(zip(confidences, truths, predictions, range(len(truths)), strict=True))
        answers = [answer for answer in answers if math.isfinite(answer[0])]
        answers.sort(key=lambda answer: (-answer[0], answer[3]))
        wrong = [answer for answer in answers if answer[1] != answer[2]][:_MOST_WRONG]
        chosen = wrong + _many_classes([answer for answer in answers if answer[1] == answer[2]])
        pictures = to_pixels(inputs[[place for *_, place in chosen]], self._pipeline)
        self._found += [
            Example(picture, true, predicted, confidence)
            for picture, (confidence, true, predicted, _) in zip(pictures, chosen, strict=True)
        ]

    def chosen(self) -> list[Example]:
        """Errors first, the most confident ones in front."""
        found = sorted(self._found, key=lambda example: -example.confidence)
        wrong = [example for example in found if example.true != example.predicted][:_MOST_WRONG]
        right = [(e.confidence, e.true, e) for e in found if e.true == e.predicted]
        return wrong + [e for *_, e in _many_classes(right)][: MOST_EXAMPLES - len(wrong)]

    def write(self, folder: RunFolder, classes: tuple[str, ...]) -> None:
        """Write examples.json, each picture a PNG in a data URI. A full disk does not end the run."""
        rows: list[dict[str, Any]] = [
            {
                "true": classes[example.true],
                "predicted": classes[example.predicted],
                "confidence": round(example.confidence, 4),
                "picture": picture_source(as_png(to_image(example.picture), _LARGEST_SIDE)),
            }
            for example in self.chosen()
        ]
        try:
            write_atomically(folder.examples, json.dumps({"examples": rows}) + "\n")
        except OSError as error:
            folder.warn_on_write_error(folder.examples.name, error)


def open_examples(components: Components, world: World) -> Examples | None:
    """Only the primary collects examples, and only of tasks with one class per sample."""
    if not world.is_primary or components.plan.info.task != SINGLE_LABEL:
        return None
    config = components.plan.config
    pipeline = build_pipeline(config.data, components.plan.info, config.train.seed)
    num_batches = len(components.test_data) // (world.world_size * config.train.test_batch_size)
    return Examples(pipeline, num_batches)


def _many_classes(answers: list[Any]) -> list[Any]:
    """The first answer of every class, then the others, so that a short list shows many classes."""
    seen: set[int] = set()
    first: list[Any] = []
    rest: list[Any] = []
    for answer in answers:
        (rest if answer[1] in seen else first).append(answer)
        seen.add(answer[1])
    return (first + rest)[:MOST_EXAMPLES]
