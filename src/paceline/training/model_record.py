"""The record of a run's model: everything that its weights need to be used, without the data and the source.

It is part of the state of every checkpoint. Prediction, export and `run.model()` use it and nothing else.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from paceline.checkpoints.format import STATE
from paceline.checkpoints.resume import restore_weights
from paceline.checkpoints.store import Checkpoint
from paceline.data.augment import Pipeline
from paceline.data.dataset import DatasetInfo
from paceline.errors import CheckpointError
from paceline.models.registry import build_model
from paceline.runs.json_files import COUNT, Fields, ListOf, Number, Word, fit
from paceline.runs.sources import Sources, SourcesTooLarge, collect_sources
from paceline.runs.trust import require_trusted_sources, sign_sources
from paceline.settings.code import code_references
from paceline.settings.schema import Config, ModelConfig

RECORD = "record"  # its key in the state of a checkpoint
RECORD_SCHEMA = 1  # increased when a field changes its meaning or is removed
TASK = "classification"
_FUNCTION_FIELDS = ("model_name", "loss", "metrics")  # the function of a data set is of no use without the data
_ONLY_IN_TRAINING = ("extras", "training_sizes", "repeats")  # parts of a pipeline that evaluation does not use
_SIZE = Number(1, 2**31, is_whole=True)
_SHAPE = Fields(
    required={
        "schema_version": Number(1, 1, is_whole=True),
        "task": Word((TASK,)),
        "data": Fields(
            required={
                "name": str,
                "classes": ListOf(str),
                "sample_shape": ListOf(_SIZE),
                "mean": ListOf(float),
                "std": ListOf(float),
                **dict.fromkeys(("num_train", "num_test"), COUNT),
            }
        ),
        **dict.fromkeys(("num_training", "num_validation"), COUNT),
        "preprocessing": Fields(
            required={
                "kind": str,
                "raw_shape": ListOf(_SIZE),
                "mean": ListOf(float),
                "std": ListOf(float),
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
    """Classes, preprocessing, model and source of a run."""

    info: DatasetInfo
    parts: tuple[int, int]  # the number of samples in training and in validation
    pipeline: Pipeline
    model: ModelConfig
    sources: Sources
    mark: str = ""  # of the user who trained it: runs/trust.py

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": RECORD_SCHEMA,
            "task": TASK,
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
        return cls(
            info=_build(DatasetInfo, data),
            parts=(values["num_training"], values["num_validation"]),
            pipeline=_build(Pipeline, preprocessing),
            model=_build(ModelConfig, {**model, "weights": "none"}),
            sources=Sources.from_json(values["sources"]),
            mark=values["mark"],
        )

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
    return ModelRecord(info, parts, pipeline, config.model, sources, mark)


def read_record(checkpoint: Checkpoint) -> ModelRecord | None:
    """The record in a checkpoint. Executes nothing. None for a checkpoint of an older version."""
    if RECORD not in checkpoint.state:
        return None
    try:
        return ModelRecord.from_json(checkpoint.state[RECORD])
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            "the record of this checkpoint's model cannot be read", where=str(checkpoint.path / STATE), got=error
        ) from error


def require_trusted_record(record: ModelRecord, checkpoint: Checkpoint) -> None:
    """UserError if the source in the record is not this user's, and not trusted."""
    sources, where = record.sources, str(checkpoint.path / STATE)
    if sources.functions:
        require_trusted_sources(sources.sha256, record.mark, functions=list(sources.functions), where=where)
