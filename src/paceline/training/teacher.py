"""Distillation: a trained model whose outputs are learned beside the labels.

The teacher runs in eval mode without gradients, on the same augmented pixels as the model. The hash of its weights is a
part of the run's config, so a resumed run refuses another teacher.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.augment import IMAGENET_MEAN, IMAGENET_STD, Pipeline
from paceline.data.dataset import DatasetInfo
from paceline.errors import UserError
from paceline.models.external import published_classes
from paceline.models.registry import build_model
from paceline.runs.catalog import locate_run
from paceline.settings.schema import Config, ModelConfig
from paceline.settings.tasks import MULTI_LABEL, SINGLE_LABEL
from paceline.training.weights_hash import hash_model

if TYPE_CHECKING:
    from paceline.training.model_record import ModelRecord
    from paceline.training.reuse import SavedRun

TIMM = "timm:"
_ANY_SHAPE = (3, 224, 224)


@dataclass(frozen=True)
class Teacher:
    """A trained model on the CPU, and what it was trained for."""

    name: str
    module: nn.Module
    sha256: str
    task: str
    num_classes: int
    classes: tuple[str, ...] | None  # None if only their number is known
    input_shape: tuple[int, ...] | None  # None: any pictures
    mean: tuple[float, ...]
    std: tuple[float, ...]


@lru_cache(maxsize=1)  # the config is completed before the model is built: one teacher is loaded once
def open_teacher(name: str) -> Teacher:
    if name.startswith(TIMM):
        count = published_classes(name)
        config = ModelConfig(model_name=name, weights="imagenet")
        module = build_model(config, _ANY_SHAPE, count).eval()
        mean, std = IMAGENET_MEAN, IMAGENET_STD
        return Teacher(name, module, hash_model(module), SINGLE_LABEL, count, None, None, mean, std)
    saved = _find(name)
    module = saved.record.load_model(saved.checkpoint)
    return _teacher_of(name, saved.record, module, hash_model(module))


def _find(name: str) -> SavedRun:
    from paceline.training.reuse import find_saved  # it imports the decoders, which other runs may not need

    return find_saved(Path(locate_run(name)), [])


def _teacher_of(name: str, record: ModelRecord, module: nn.Module, digest: str) -> Teacher:
    pipeline, info = record.pipeline, record.info
    shape, classes = tuple(pipeline.input_shape), info.classes
    return Teacher(name, module, digest, info.task, len(classes), classes, shape, pipeline.mean, pipeline.std)


def check_recorded_teacher(name: str, info: DatasetInfo, pipeline: Pipeline) -> None:
    """UserError if the record of a run does not fit this data. Loads no weights."""
    if name and not name.startswith(TIMM):
        _require_fitting(_teacher_of(name, _find(name).record, nn.Identity(), ""), info, pipeline)


def name_teacher(config: Config) -> Config:
    """The config with the hash of its teacher. UserError if it names another hash."""
    given = config.objective
    if not given.teacher:
        return config
    teacher = open_teacher(given.teacher)
    if given.teacher_sha256 not in ("", teacher.sha256):
        raise UserError(
            "this is not the teacher of the run",
            where="--teacher",
            got=f"{given.teacher}, SHA-256 {teacher.sha256[:16]}...",
            allowed=f"a teacher with the SHA-256 {given.teacher_sha256[:16]}...",
            hint="name the checkpoint that the run learned from, or start a new run",
        )
    return replace(config, objective=replace(given, teacher_sha256=teacher.sha256))


class Distillation:
    """The teacher's part of the loss."""

    def __init__(self, teacher: Teacher, config: Config, info: DatasetInfo, pipeline: Pipeline, device: str) -> None:
        _require_fitting(teacher, info, pipeline)
        options = config.objective
        self._task, self._kind = info.task, options.distill
        self._temperature, self._weight = options.distill_temperature, options.distill_weight
        self._module = teacher.module.to(device).eval().requires_grad_(False)
        self._change = _change_of_colours(pipeline, teacher, device)

    def blend(self, loss: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
        """The loss of the labels and the teacher's part, weighted."""
        return (1 - self._weight) * loss + self._weight * self._teachers_part(outputs, self._answers(inputs))

    @torch.no_grad()
    def _answers(self, inputs: Tensor) -> Tensor:
        if self._change is not None:
            factor, offset = self._change
            inputs = inputs * factor + offset
        answers: Tensor = self._module(inputs)
        return answers.float()

    def _teachers_part(self, outputs: Tensor, answers: Tensor) -> Tensor:
        if self._kind == "hard":
            return F.cross_entropy(outputs, answers.argmax(1))
        # The gradient of soft targets shrinks with the square of the temperature.
        temperature = self._temperature
        if self._task == SINGLE_LABEL:
            own, teachers = ((values / temperature).log_softmax(1) for values in (outputs, answers))
            return F.kl_div(own, teachers, reduction="batchmean", log_target=True) * temperature**2
        if self._task == MULTI_LABEL:
            shares = (answers / temperature).sigmoid()
            return F.binary_cross_entropy_with_logits(outputs / temperature, shares) * temperature**2
        return F.mse_loss(outputs, answers)


def _require_fitting(teacher: Teacher, info: DatasetInfo, pipeline: Pipeline) -> None:
    if teacher.task != info.task:
        raise UserError(
            "the teacher has another task", where="--teacher", got=f"{teacher.name}: {teacher.task}", allowed=info.task
        )
    is_same = teacher.classes == info.classes if teacher.classes else teacher.num_classes == info.num_classes
    if not is_same:
        raise UserError(
            "the teacher has other classes than the data",
            where="--teacher",
            got=f"{teacher.name}: {_in_words(teacher.classes, teacher.num_classes)}",
            allowed=_in_words(info.classes, info.num_classes),
        )
    shapes = {tuple(pipeline.input_shape)}
    shapes |= {tuple(pipeline.in_epoch(start).input_shape) for start, _ in pipeline.training_sizes}
    shape = max(shapes)
    if (teacher.input_shape is not None and {teacher.input_shape} != shapes) or (
        teacher.input_shape is None and shape[0] != 3
    ):
        raise UserError(
            "the teacher takes inputs of another shape",
            where="--teacher",
            got=f"{teacher.name}: {'x'.join(map(str, teacher.input_shape or ('3', 'H', 'W')))}",
            allowed=" and ".join("x".join(map(str, each)) for each in sorted(shapes)),
        )


def _in_words(classes: tuple[str, ...] | None, count: int) -> str:
    names = f": {', '.join(classes[:8])}{', ...' if count > 8 else ''}" if classes else ""
    return f"{count} classes{names}"


def _change_of_colours(pipeline: Pipeline, teacher: Teacher, device: str) -> tuple[Tensor, Tensor] | None:
    """Factor and offset from the model's normalisation to the teacher's. None if they are the same."""
    if (pipeline.mean, pipeline.std) == (teacher.mean, teacher.std):
        return None
    own_mean, own_std, mean, std = (
        torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1)
        for values in (pipeline.mean, pipeline.std, teacher.mean, teacher.std)
    )
    return (own_std / std).float().to(device), ((own_mean - mean) / std).float().to(device)
