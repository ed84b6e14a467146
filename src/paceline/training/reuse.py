"""A finished run, opened to predict, to be exported or to be evaluated.

Prediction and export use the record in the checkpoint (model_record.py). Evaluation also loads the data, and refuses
other data than the run was trained with.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoints.format import STATE
from paceline.checkpoints.named import NamedCheckpoint, find_named
from paceline.checkpoints.resume import require_checkpoint, require_fitting_weights, restore_weights
from paceline.checkpoints.store import Checkpoint
from paceline.data.augment import build_pipeline
from paceline.data.dataset import Dataset, DatasetInfo, LoadedData
from paceline.data.fingerprint import differences, fingerprint_of
from paceline.data.known_files import require_data_folder
from paceline.data.loader import Loader
from paceline.data.registry import load_dataset
from paceline.data.sources.folder import read_picture
from paceline.errors import CheckpointError, DataError, PacelineError, UserError
from paceline.models.external import first_line
from paceline.parallel.apply import ParallelModel, autocast, parallelise
from paceline.runs.trust import TRUST_FLAG, is_trusting, require_trusted_code, trusting_code
from paceline.runtime.detect import ALONE, World, build_world
from paceline.runtime.seeds import require_determinism
from paceline.settings.load import load_saved
from paceline.settings.rules import check_config
from paceline.settings.schema import Config, ParallelConfig
from paceline.settings.values import Setting
from paceline.training.evaluate import Evaluation, average_over_views, evaluate
from paceline.training.model_record import (
    ModelRecord,
    make_record,
    read_record,
    require_trusted_record,
    unusable_record,
)
from paceline.training.objective import build_objective
from paceline.training.plan import RunPlan, make_plan, split_samples
from paceline.training.run_data import RunData
from paceline.training.scores import as_answers

_log = logging.getLogger("paceline")
_NO_RECORD = "this checkpoint is of an older version: its classes and preprocessing must be read from its data"
_DATA_HINT = "--data-dir PATH names the folder of its data"
_HINT = "give the data it was trained with (--data-dir PATH), or train the run again"


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of a run, with everything that is needed to use its weights."""

    config: Config
    checkpoint: Checkpoint
    record: ModelRecord
    folder: Path | None  # the run folder; None for a checkpoint without one
    is_code_trusted: bool  # the user trusts all code that the run names


@dataclass(frozen=True)
class OpenRun:
    """A saved run whose model is on its device."""

    config: Config
    world: World
    checkpoint: Checkpoint
    record: ModelRecord
    plan: RunPlan
    model: ParallelModel
    folder: Path | None
    is_code_trusted: bool

    @property
    def classes(self) -> tuple[str, ...]:
        return self.record.info.classes

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.module.parameters())


def find_saved(
    path: Path, flags: Sequence[str | Setting], *, checkpoint: str | int = "", trust_code: bool = False
) -> SavedRun:
    """The best checkpoint of a run (the latest, if it ended before its first epoch did), or that of `checkpoint`: best,
    latest or a step. `path` may be a checkpoint folder too, also one without its run.

    Raises UserError for stored code that is not this user's, unless it is trusted.
    """
    named = find_named(path, checkpoint)
    given = [flag for flag in flags if flag != TRUST_FLAG]
    found = _find_checkpoint(named)
    if not isinstance(found.state.get("config"), dict) or not found.state["config"]:
        raise CheckpointError("this checkpoint does not record its config", where=str(found.path))
    loaded = load_saved(found.state["config"], found.path / STATE, given)
    check_config(loaded)
    # One process uses the weights, whatever strategy trained them.
    alone = dataclasses.replace(loaded.config.parallel, strategy="single", processes="1", cpu_offload=False)
    config = dataclasses.replace(loaded.config, parallel=alone)
    with trusting_code(trust_code or TRUST_FLAG in flags):
        record = read_record(found)
        if record is None:
            record = _record_of_data(config, found, named)
        else:
            require_trusted_record(record, found)
        is_trusted = is_trusting()
    _require_fitting(record, found, config.train.test_views)
    return SavedRun(config, found, record, named.run, is_trusted)


def _require_fitting(record: ModelRecord, checkpoint: Checkpoint, views: int) -> None:
    """CheckpointError for a built-in model that does not fit the weights or the samples. Takes no memory.

    Other models are not built here: their functions may read values, which the meta device does not have.
    """
    if ":" in record.model.model_name:
        return
    try:
        with torch.device("meta"), torch.no_grad():
            model = record.build_model().eval()
            require_fitting_weights(checkpoint, model)
            average_over_views(model, torch.zeros(2, *record.pipeline.input_shape), views)
    except CheckpointError:
        raise
    except Exception as error:  # torch raises several kinds for shapes that do not fit
        raise unusable_record(checkpoint, first_line(error)) from error


def _find_checkpoint(named: NamedCheckpoint) -> Checkpoint:
    alone = build_world(ParallelConfig(strategy="single", processes="1", device="cpu"), ALONE)
    return require_checkpoint(named.source, alone, prefer_best=named.prefer_best)


def stored_source(path: Path, checkpoint: str | int = "") -> dict[str, str]:
    """The text of the user's modules in a checkpoint, by module and file name. Nothing is executed."""
    record = read_record(_find_checkpoint(find_named(path, checkpoint)))
    modules = record.sources.modules if record is not None else {}
    return {f"{name} ({module.file})": module.text for name, module in modules.items()}


def open_run(
    path: Path, flags: Sequence[str | Setting], *, checkpoint: str | int = "", trust_code: bool = False
) -> OpenRun:
    """A saved run with its weights, in this process. Arguments as in `find_saved`."""
    saved = find_saved(path, flags, checkpoint=checkpoint, trust_code=trust_code)
    config, record = saved.config, saved.record
    world = build_world(config.parallel, ALONE)
    torch.set_num_threads(world.threads)
    if config.train.deterministic or config.parallel.exact:
        require_determinism()
    else:
        torch.backends.cudnn.benchmark = True
    plan = make_plan(config, record.info, world.world_size, record.parts)
    plan = dataclasses.replace(plan, input_shape=record.pipeline.input_shape)
    model = parallelise(record.build_model(), config, world)
    restore_weights(saved.checkpoint, model.module)
    return OpenRun(config, world, saved.checkpoint, record, plan, model, saved.folder, saved.is_code_trusted)


def _record_of_data(config: Config, checkpoint: Checkpoint, named: NamedCheckpoint) -> ModelRecord:
    """The record of a checkpoint that has none, from its data and the files of its functions."""
    where = str(checkpoint.path)
    if "data" not in checkpoint.state:
        raise CheckpointError(_NO_RECORD, where=where, got="no fingerprint of the data", hint=_HINT)
    require_trusted_code(named.run or named.source, config)
    try:
        data = load_dataset(config.data, config.train.seed)
    except PacelineError as error:
        raise CheckpointError(_NO_RECORD, where=where, got=f"no data: {error.what}", hint=_HINT) from error
    changed = _differences(checkpoint, data)
    if changed:
        raise CheckpointError(_NO_RECORD, where=where, got="other data:\n" + "\n".join(changed), hint=_HINT)
    _log.info("note: %s; they are read from the data, which is the same", _NO_RECORD)
    pipeline = build_pipeline(config.data, data.info, config.train.seed)
    train, validation = split_samples(data.info, config)
    return make_record(config, data.info, (len(train), len(validation)), pipeline, is_marked=False)


def _differences(checkpoint: Checkpoint, data: LoadedData) -> list[str]:
    """How data differs from that of a checkpoint. Empty if it is the same."""
    if "data" not in checkpoint.state:
        return ["the checkpoint has no fingerprint of its data"]
    saved = RunData.from_json(checkpoint.state["data"], str(checkpoint.path))
    return differences(saved.fingerprint, fingerprint_of(data))


def load_test_data(run: OpenRun) -> Loader:
    """The run's own test set, or with --accept-new-data another one with the same classes."""
    config, record = run.config, run.record
    with trusting_code(run.is_code_trusted):  # the function of a data set is not stored: it is useless without the data
        require_trusted_code(run.folder or run.checkpoint.path, config, fields=("dataset",))
    require_data_folder(config.data, where="--data-dir", hint=_DATA_HINT)
    data = load_dataset(config.data, config.train.seed)
    changed = _differences(run.checkpoint, data)
    other_classes = (
        data.info.task != record.info.task
        or data.info.classes != record.info.classes
        or data.info.sample_shape != record.info.sample_shape
    )
    if other_classes or (changed and not config.run.accept_new_data):
        raise DataError(
            "this is not the data that the run was trained with",
            where=f"{config.data.dataset}, {config.data.data_dir}",
            got="\n".join(changed),
            hint=_DATA_HINT if other_classes else f"{_DATA_HINT}; --accept-new-data evaluates on this data",
        )
    return Loader(data.test, torch.arange(len(data.test)), record.pipeline, run.world)


def require_same_samples(samples: Tensor, info: DatasetInfo) -> None:
    """UserError unless samples [N, ...] have the shape and type of those that the run was trained on."""
    dtype = torch.float32 if info.is_float else torch.uint8
    if tuple(samples.shape[1:]) != info.sample_shape or samples.dtype != dtype:
        raise UserError(
            "this run was trained on other samples",
            got=f"{samples.dtype} of shape {tuple(samples.shape)}",
            allowed=f"{dtype} of shape (N, {', '.join(map(str, info.sample_shape))})",
        )


def evaluate_run(run: OpenRun, test: Dataset | None = None) -> Evaluation:
    """Test the weights on the run's test set, or on another data set of the same classes.

    Raises DataError if the run's data has changed.
    """
    config, record = run.config, run.record
    if test is not None:
        require_same_samples(test.read(torch.tensor([0])), record.info)
    data = load_test_data(run) if test is None else Loader(test, torch.arange(len(test)), record.pipeline, run.world)
    with record.forward_explained(run.model.module):
        return evaluate(
            run.model,
            data,
            run.world,
            num_classes=record.info.num_classes,
            batch_size=config.train.test_batch_size,
            objective=build_objective(config, record.sources.resolve),
            shares_per_rank=(config.parallel.lanes or 1) if config.parallel.exact else 1,
            views=config.train.test_views,
        )


@torch.no_grad()
def predict_pictures(run: OpenRun, pictures: list[Path]) -> list[list[float]]:
    """The answers for each picture, one per class (`as_answers`).

    Pictures are prepared, cut into batches and averaged over views as in the evaluation.
    """
    info = run.record.info
    if not info.takes_pictures:
        raise UserError("this run was not trained on pictures", got=f"samples of shape {info.sample_shape}")
    model, train = run.model, run.config.train
    model.module.eval()
    answers: list[list[float]] = []
    for start in range(0, len(pictures), train.test_batch_size):
        batch = pictures[start : start + train.test_batch_size]
        samples = torch.stack([read_picture(picture, info.sample_shape[1]) for picture in batch])
        if info.sample_shape[0] == 1:
            samples = samples.float().mean(1, keepdim=True).round().to(torch.uint8)
        inputs = run.record.pipeline.for_evaluation(samples.to(run.world.device))
        with run.record.forward_explained(model.module), autocast(model, run.world):
            logits = average_over_views(model.module, inputs, train.test_views).float()
        answers += as_answers(info.task, logits).tolist()
    return answers
