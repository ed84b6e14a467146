"""The record of a run's model: everything that its weights need to be used, without the data and the source.

It is part of the state of every checkpoint. Prediction, export and `run.model()` use it and nothing else.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoints.format import STATE
from paceline.checkpoints.resume import checkpoint_folder, restore_weights
from paceline.checkpoints.store import Checkpoint, open_checkpoint
from paceline.data.augment import SHIFTED, Pipeline
from paceline.data.dataset import MOST_CLASSES, DatasetInfo
from paceline.errors import Cause, CheckpointError, PacelineError, UserError
from paceline.models.checks import require_logits
from paceline.models.external import COLLECTIONS, first_line
from paceline.models.registry import build_model, check_model_name
from paceline.runs.json_files import COUNT, Fields, ListOf, Number, Word, fit
from paceline.runs.sources import ORIGIN, Sources, SourcesTooLarge, collect_sources
from paceline.runs.trust import require_trusted_sources, sign_sources
from paceline.settings.resolution import RESIZED
from paceline.settings.schema import Config, ModelConfig
from paceline.settings.syntax import code_references
from paceline.settings.tasks import SINGLE_LABEL, TASKS

RECORD = "record"  # its key in the state of a checkpoint
RECORD_SCHEMA = 1  # increased when a field changes its meaning or is removed
_OLD_TASK = "classification"  # of records before other tasks than single-label
_FUNCTION_FIELDS = ("model_name", "loss", "metrics")  # the function of a data set is of no use without the data
_ONLY_IN_TRAINING = ("extras", "training_sizes", "repeats")  # parts of a pipeline that evaluation does not use
_SIZE = Number(1, 2**31, is_whole=True)
_MEAN, _STD = Number(-1e6, 1e6), Number(1e-30, 1e6)
_MOST_VALUES = 2**26  # of a sample: 4096 x 4096 pixels in colour
_SHAPE = Fields(
    required={
        "schema_version": Number(1, 1, is_whole=True),
        "task": Word((_OLD_TASK, *TASKS)),
        "data": Fields(
            required={
                "name": str,
                "classes": ListOf(str),
                "sample_shape": ListOf(_SIZE),
                "mean": ListOf(_MEAN),
                "std": ListOf(_STD),
                **dict.fromkeys(("num_train", "num_test"), COUNT),
            },
            optional=dict.fromkeys(("num_validation", "num_skipped"), COUNT),
        ),
        **dict.fromkeys(("num_training", "num_validation"), COUNT),
        "preprocessing": Fields(
            required={
                "kind": Word(("none", *SHIFTED, *RESIZED)),
                "raw_shape": ListOf(_SIZE),
                "mean": ListOf(_MEAN),
                "std": ListOf(_STD),
                **dict.fromkeys(("flip",), bool),
                **dict.fromkeys(("seed", "image_size", "cutout"), COUNT),
            }
        ),
        "model": Fields(required={"model_name": str, "hidden_size": _SIZE, "dropout": Number(0, 1)}),
        "sources": Fields(),
        "mark": str,
    }
)
_log = logging.getLogger("paceline")


@dataclass(frozen=True)
class ModelRecord:
    """Task, classes, preprocessing, model and source of a run."""

    info: DatasetInfo
    parts: tuple[int, int]  # the number of samples in training and in validation
    pipeline: Pipeline
    model: ModelConfig
    sources: Sources
    mark: str = ""  # of the user who trained it: runs/trust.py

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": RECORD_SCHEMA,
            "task": self.info.task,
            "data": asdict(self.info),
            "num_training": self.parts[0],
            "num_validation": self.parts[1],
            "input_shape": list(self.pipeline.input_shape),
            "preprocessing": {
                name: value for name, value in asdict(self.pipeline).items() if name not in _ONLY_IN_TRAINING
            },
            "model": asdict(self.model),
            "sources": self.sources.to_json(),
            "mark": self.mark,
        }

    @classmethod
    def from_json(cls, values: Any) -> ModelRecord:
        """Raises ValueError for values that no run has saved."""
        values = fit(values, _SHAPE)
        data, preprocessing, model = values["data"], values["preprocessing"], values["model"]
        task = values["task"]
        task = SINGLE_LABEL if task == _OLD_TASK else task
        record = cls(
            info=_build(DatasetInfo, {**data, "task": task, "folders": ()}),
            parts=(values["num_training"], values["num_validation"]),
            pipeline=_build(Pipeline, preprocessing),
            model=_build(ModelConfig, {**model, "weights": "none"}),
            sources=Sources.from_json(values["sources"]),
            mark=values["mark"],
        )
        record.check()
        return record

    def check(self) -> None:
        """ValueError for classes, samples and a model that do not belong together."""
        info, pipeline = self.info, self.pipeline
        if not 1 <= info.num_classes <= MOST_CLASSES:
            raise ValueError(f"{info.num_classes} classes")
        if len(info.sample_shape) not in (1, 3) or info.sample_shape != pipeline.raw_shape:
            raise ValueError(f"samples of shape {info.sample_shape}, prepared as {pipeline.raw_shape}")
        # Floats are not normalised: they have neither mean nor deviation.
        channels = info.sample_shape[0] if info.is_image and not info.is_float else 0
        for name, values in (("mean", info.mean), ("std", info.std), ("mean", pipeline.mean), ("std", pipeline.std)):
            if len(values) != channels:
                raise ValueError(f"{name} has {len(values)} values for {channels} channels")
        if pipeline.kind in RESIZED and not info.is_image:
            raise ValueError(f"{pipeline.kind} of samples that are no images")
        if pipeline.most_values > _MOST_VALUES:
            raise ValueError(f"a sample of {pipeline.most_values:,} values; at most {_MOST_VALUES:,}")
        name = self.model.model_name
        if ":" in name and name.rpartition(":")[0] not in COLLECTIONS:
            if name not in self.sources.functions:
                raise ValueError(f"the source of {name} is missing")
        elif ":" not in name:
            try:
                check_model_name(name)
            except UserError as error:
                raise ValueError(f"{error.what}: {name!r}") from error

    @contextmanager
    def forward_explained(self, model: nn.Module) -> Iterator[None]:
        """In this block, a failure of an external model becomes a UserError with the line in its source."""
        name = self.model.model_name
        if ":" not in name:
            yield
            return
        handle = model.register_forward_hook(self._check_output)
        try:
            yield
        except (PacelineError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(ORIGIN)]
            place = f", {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
            raise UserError(
                "the model failed", where=f"{name}{place}", got=first_line(error), cause=Cause.USER_CODE
            ) from error
        finally:
            handle.remove()

    def _check_output(self, model: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        require_logits(output, len(inputs[0]), self.info.num_classes, self.model.model_name)

    def build_model(self) -> nn.Module:
        """The model without its weights, on the CPU. The caller's random state does not change."""
        shape, classes = self.pipeline.input_shape, self.info.num_classes
        with torch.random.fork_rng(devices=[]):
            return build_model(self.model, shape, classes, load_weights=False, resolve=self.sources.resolve)

    def load_model(self, checkpoint: Checkpoint) -> nn.Module:
        """The model with the weights of a checkpoint, on the CPU, in eval mode."""
        model = self.build_model()
        restore_weights(checkpoint, model)
        return model.eval()


def _build(kind: type[Any], values: dict[str, Any]) -> Any:
    """A dataclass from JSON. Lists become tuples, and fields that this version does not know are left out."""
    known = {name: values[name] for name in kind.__dataclass_fields__ if name in values}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})


def make_record(
    config: Config, info: DatasetInfo, parts: tuple[int, int], pipeline: Pipeline, *, is_marked: bool
) -> ModelRecord:
    """The record of a model that was built in this process, so that its functions are imported."""
    references = [item for item in code_references(config) if item.field in _FUNCTION_FIELDS]
    try:
        sources = collect_sources(references)
    except SourcesTooLarge as error:
        _log.warning("warning: modules that %s imports are not stored with the run: %s", error.names, error)
        sources = collect_sources(references, follows_imports=False)
    mark = sign_sources(sources.sha256) if references and is_marked else ""
    record = ModelRecord(info, parts, pipeline, config.model, sources, mark)
    try:
        record.check()
    except ValueError as error:
        raise UserError("a model of this data could not be used after the training", got=error) from error
    return record


def read_record(checkpoint: Checkpoint) -> ModelRecord | None:
    """The record in a checkpoint. Executes nothing. None for a checkpoint of an older version."""
    if RECORD not in checkpoint.state:
        return None
    try:
        return ModelRecord.from_json(checkpoint.state[RECORD])
    except (ValueError, TypeError) as error:
        raise unusable_record(checkpoint, str(error)) from error


def was_for_other_classes(source: Path, info: DatasetInfo) -> bool:
    """Whether a run or checkpoint was trained for other classes than this data has. A file does not say."""
    record = None if source.is_file() else read_record(open_checkpoint(checkpoint_folder(source)))
    return record is not None and (record.info.task, record.info.classes) != (info.task, info.classes)


def unusable_record(checkpoint: Checkpoint, reason: str) -> CheckpointError:
    what = "the record of this checkpoint's model cannot be used"
    return CheckpointError(what, where=str(checkpoint.path / STATE), got=reason)


def require_trusted_record(record: ModelRecord, checkpoint: Checkpoint) -> None:
    """UserError if the source in the record is not this user's, and not trusted."""
    sources, where = record.sources, str(checkpoint.path / STATE)
    if sources != Sources():
        require_trusted_sources(sources.sha256, record.mark, functions=list(sources.functions), where=where)
