"""The objects of a run on one rank, built in this order: data, model, strategy, optimizer, step."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import paceline
from paceline.checkpoints.capture import Tensors, model_tensors, optimizer_tensors
from paceline.checkpoints.identity import (
    SILENT,
    require_same_run,
    warn_of_changed_code,
    warn_of_other_random_numbers,
)
from paceline.checkpoints.resume import reader_of, restore_training, start_from
from paceline.checkpoints.store import Checkpoint
from paceline.data.augment import Pipeline, build_pipeline
from paceline.data.changes import excluded_samples, with_new_labels
from paceline.data.dataset import DatasetInfo, LoadedData
from paceline.data.loader import Loader
from paceline.data.sampling import Sampling, sampling_of
from paceline.data.shared import load_once_per_node
from paceline.errors import CheckpointError
from paceline.metrics.start_clock import StartClock
from paceline.models.dropout import RANDOM_NUMBERS
from paceline.models.recompute import recompute_blocks
from paceline.models.registry import build_model
from paceline.parallel.apply import ParallelModel, parallelise, settle_buckets
from paceline.parallel.buffers import average_rows, gather_own_buffers, running_statistics, set_own_buffers
from paceline.parallel.collectives import gather_texts
from paceline.runs.epoch_clock import EpochClock
from paceline.runs.trust import hash_code
from paceline.runtime.detect import World
from paceline.runtime.seeds import require_determinism, seed_initial_weights
from paceline.settings.schema import Config, flatten
from paceline.settings.syntax import CodeReference, code_references
from paceline.training.compiling import choose_to_compile, compile_for_sizes
from paceline.training.freezing import Freezing
from paceline.training.guards import Guards
from paceline.training.input_sizes import require_sizes
from paceline.training.model_record import RECORD, ModelRecord, make_record, was_for_other_classes
from paceline.training.objective import Objective, build_objective, find_class_weights
from paceline.training.objective_check import check_objective
from paceline.training.optim import MovingAverage, build_average, build_optimizer
from paceline.training.plan import RunPlan, make_plan, split_samples
from paceline.training.proxy import name_proxy, select_samples
from paceline.training.recorded_step import build_step
from paceline.training.run_data import RunData, agree_on_data, data_to_go_on_with, describe_split, split_again
from paceline.training.same_ranks import require_same_data, require_same_functions
from paceline.training.state import TrainState
from paceline.training.step import TrainStep
from paceline.training.teacher import Distillation, name_teacher, open_teacher
from paceline.training.unseen import FIRST_LOOK_SAMPLES, Usage, looks_at_data, require_unseen

_log = logging.getLogger("paceline")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Components:
    """The objects of a run on this rank. A resume changes their values, not which objects they are."""

    plan: RunPlan
    train_data: Loader
    validation_data: Loader
    test_data: Loader
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None
    step: TrainStep
    data: RunData
    record: ModelRecord | None  # None on all ranks but the primary, and where nothing is trained
    code: dict[CodeReference, str]  # a hash of the source of each function of the user, as it was compiled

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.module.parameters())

    def checkpoint_bytes(self) -> int:
        """The approximate size of one checkpoint: weights, optimizer state, moving average."""
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.model.module.parameters())
        has_two = self.plan.config.optim.optimizer in ("adam", "adamw", "lamb")
        copies = 1 + (2 if has_two else 1) + (self.average is not None)
        return weights * copies

    def average_values(self) -> Tensors:
        return self.average.named_values() if self.average else {}

    def payload(self, world: World) -> dict[str, Tensors]:
        """Every tensor that a resume needs, by kind. Collective if ranks have their own running statistics."""
        module = self.model.module
        payload = {"model": model_tensors(module), "optimizer": optimizer_tensors(module, self.optimizer)}
        rows = gather_own_buffers(module, world)
        if rows:
            # The model gets the mean of the statistics, for evaluation. A resumed rank takes its own row.
            names = running_statistics(module).keys() & rows.keys()
            payload["model"].update({name: average_rows(rows[name]) for name in sorted(names)})
            payload["statistics"] = rows
        if self.average is not None:
            payload["ema"] = self.average_values()
        return payload

    def state_json(self, state: TrainState, *, keep: bool) -> dict[str, Any]:
        """The content of a checkpoint's state.json."""
        return {
            **state.to_json(),
            "keep": keep,
            **self.plan.clock.to_json(),
            "scaler": self.step.scaler.state_dict(),
            "config": flatten(self.plan.config),
            "data": self.data.to_json(),
            "random_numbers": RANDOM_NUMBERS,
            "code": {item.name: digest for item, digest in self.code.items()},
            **({RECORD: self.record.to_json()} if self.record is not None else {}),
        }

    def about(self, state: TrainState) -> dict[str, Any]:
        """The origin of a checkpoint, for its manifest."""
        return {
            "step": state.step,
            "world_size": self.plan.world_size,
            "strategy": self.model.strategy,
            "config_hash": hash_config(self.plan.config),
            "paceline": paceline.__version__,
            "torch": torch.__version__,
        }

    def resume(self, checkpoint: Checkpoint, world: World) -> TrainState:
        """Restore everything from a checkpoint of this run. Returns its state."""
        warn_of_changed_code(checkpoint, self.code)
        if self.model.draws_by_sample:
            warn_of_other_random_numbers(checkpoint, RANDOM_NUMBERS)
        state = _read_state(checkpoint, TrainState.from_json)  # first: an unreadable one must not be half restored
        restore_training(checkpoint, self.model.module, self.optimizer, self.average_values())
        if checkpoint.files_of("statistics"):
            rows = reader_of(checkpoint, "statistics")
            set_own_buffers(self.model.module, {name: rows.read(name) for name in rows.shapes}, world)
        self.step.forget_recordings()
        if self.step.scaler.is_enabled():
            self.step.scaler.load_state_dict(checkpoint.state["scaler"])
        return state


def _count_epochs_from(checkpoint: Checkpoint) -> Callable[[int], EpochClock]:
    saved = _read_state(checkpoint, EpochClock.from_json)
    return EpochClock if saved is None else partial(saved.at_other_length, checkpoint.step)


def _read_state(checkpoint: Checkpoint, read: Callable[[dict[str, Any]], _T]) -> _T:
    try:
        return read(checkpoint.state)
    except ValueError as error:
        where = str(checkpoint.path / "state.json")
        raise CheckpointError(
            "the state of a run cannot be read from this checkpoint", where=where, got=error
        ) from error


def hash_config(config: Config) -> str:
    """Of everything that decides what is computed."""
    values = {name: value for name, value in flatten(config).items() if name not in SILENT}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _compare_configs(checkpoint: Checkpoint, config: Config, world_size: int) -> None:
    """Refuse a checkpoint of another run; name the settings that differ and may."""
    now = flatten(config)
    for name in require_same_run(checkpoint, now, lanes=config.parallel.lanes or world_size):
        saved = checkpoint.state["config"].get(name)
        _log.info("note: %s was %r when the checkpoint was saved, is %r now", name, saved, now[name])


@dataclass(frozen=True)
class _Samples:
    """The data of a run: what it is, and which samples are trained on and validated with."""

    loaded: LoadedData
    about: RunData
    train_ids: Tensor  # with the excluded ones: they keep their places in the order
    validation_ids: Tensor  # also with the excluded ones
    excluded: Tensor

    @property
    def used_ids(self) -> Tensor:
        """The samples that are trained on."""
        return self.train_ids[~torch.isin(self.train_ids, self.excluded)]

    @property
    def train_labels(self) -> Tensor:
        return self.loaded.train.labels[self.used_ids]

    @property
    def used_validation_ids(self) -> Tensor:
        """A validation set of the data's own has other numbers, and is not changed."""
        is_own = self.loaded.validation is not None
        return self.validation_ids if is_own else self.validation_ids[~torch.isin(self.validation_ids, self.excluded)]

    def usage(self, plan: RunPlan, model: nn.Module) -> Usage:
        held_out = self.validation_ids if self.loaded.validation is None else self.validation_ids[:0]
        order = sampling_of(plan.config.data, self.loaded.train, self.train_ids)
        return Usage(plan, self.train_ids, held_out, order, looks_at_data(model))

    def sampling(self, config: Config, world: World, guards: Guards, *, is_for_training: bool) -> Sampling:
        """How an epoch's samples are chosen. Collective."""
        plain = sampling_of(config.data, self.loaded.train, self.train_ids, self.excluded)
        if not is_for_training:
            return plain
        is_alive = partial(guards.enter, "start", 0)
        loaded = self.loaded
        return replace(plain, kept=select_samples(config, loaded.train, loaded.info, self.train_ids, world, is_alive))


def _load_samples(config: Config, world: World, checkpoint: Checkpoint | None, *, is_for_training: bool) -> _Samples:
    """Load the data. A checkpoint may decide which samples are trained on. Collective."""
    loaded = load_once_per_node(config.data, config.train.seed, world, partial(gather_texts, world=world))
    require_same_data(loaded.fingerprint(), world)
    fingerprint = agree_on_data(loaded, world)
    train_ids, validation_ids = split_samples(loaded.info, config)
    # Only the primary writes checkpoints.
    is_described = world.is_primary and is_for_training
    held_out = describe_split(loaded, train_ids, validation_ids) if is_described else None
    about = RunData(fingerprint, held_out=held_out)
    if checkpoint is not None:
        may_differ, has_validation = config.run.accept_new_data, len(validation_ids) > 0
        about = data_to_go_on_with(checkpoint, about, may_differ=may_differ, has_validation=has_validation)
        if about.is_split_by_keys:
            train_ids, validation_ids = split_again(loaded, about)
    excluded = excluded_samples(loaded, config.data, train_ids)
    return _Samples(with_new_labels(loaded, config.data), about, train_ids, validation_ids, excluded)


def _build_objective(
    config: Config, samples: _Samples, pipeline: Pipeline, device: str, *, is_for_training: bool
) -> Objective:
    info, teacher = samples.loaded.info, None
    class_weights = find_class_weights(config, samples.train_labels, info.classes, device)
    if config.objective.teacher and is_for_training:
        teacher = Distillation(open_teacher(config.objective.teacher), config, info, pipeline, device)
    return build_objective(config, class_weights=class_weights, teacher=teacher, num_outputs=info.num_classes)


def _open_validation(samples: _Samples, train_data: Loader, world: World) -> Loader:
    if samples.loaded.validation is None:
        return train_data.on_part(samples.used_validation_ids)
    return Loader(samples.loaded.validation, samples.validation_ids, train_data.pipeline, world)


def _build_initial_model(
    plan: RunPlan, samples: _Samples, pipeline: Pipeline, start: StartClock, *, load_weights: bool
) -> nn.Module:
    """The model with its initial weights, the same on every rank."""
    config, data = plan.config, samples.loaded
    seed_initial_weights(config.train.seed)
    model = build_model(config.model, plan.input_shape, data.info.num_classes, load_weights=load_weights)
    if not load_weights:
        return model
    require_sizes(model, config.model.model_name, {plan.input_shape, *plan.training_shapes})
    if config.run.init_from:
        _start_from(model, Path(config.run.init_from), data.info)
    look_at: Any = getattr(model, "look_at", None)  # a model may take its first layer from the data
    if look_at is not None:
        with start.set_up_from_data():
            look_at(pipeline.for_evaluation(data.train.read(samples.used_ids[:FIRST_LOOK_SAMPLES])))
    return model


def build_components(
    config: Config,
    world: World,
    guards: Guards | None = None,
    *,
    load_weights: bool = True,
    checkpoint: Checkpoint | None = None,
) -> Components:
    """Build everything for a run. Without `load_weights` it is not for training: nothing is warmed up or checked.

    `checkpoint`: the run continues from it, so it decides on the samples and on the count of epochs. Its tensors are
    restored by `Components.resume`.
    """
    config = name_proxy(name_teacher(config)) if load_weights else config
    if checkpoint is not None:
        _compare_configs(checkpoint, config, world.world_size)
        _read_state(checkpoint, TrainState.from_json)
    if config.train.deterministic or config.parallel.exact:
        require_determinism()
    else:
        torch.backends.cudnn.benchmark = True  # all batches have one size: try the kernels once, use the fastest
    guards = guards or Guards()
    guards.start.enter("data")
    samples = _load_samples(config, world, checkpoint, is_for_training=load_weights)
    data, train_ids = samples.loaded, samples.train_ids
    parts = len(train_ids), len(samples.used_validation_ids)
    count_epochs = EpochClock if checkpoint is None else _count_epochs_from(checkpoint)
    plan = make_plan(config, data.info, world.world_size, parts, count_epochs)
    pipeline = build_pipeline(config.data, data.info, config.train.seed)
    sampling = samples.sampling(config, world, guards, is_for_training=load_weights)
    train_data = Loader(data.train, train_ids, pipeline, world, sampling)
    objective = _build_objective(config, samples, pipeline, world.device, is_for_training=load_weights)

    guards.start.enter("model")
    model = _build_initial_model(plan, samples, pipeline, guards.start, load_weights=load_weights)
    if checkpoint is not None:
        require_unseen(checkpoint, config, samples.usage(plan, model))
    freezing = Freezing(config.optim, model, plan.clock) if config.optim.freeze else None
    if config.train.activation_checkpointing and load_weights:
        recompute_blocks(model, draws_from_torch=":" in config.model.model_name)
    is_compiled = load_weights and choose_to_compile(model, config, plan, world)
    if is_compiled:
        compile_for_sizes(len(plan.training_shapes))
    parallel = parallelise(model, config, world, is_compiled=is_compiled)
    first_epoch = plan.clock.locate(checkpoint.step)[0] if checkpoint is not None else 0
    train_shape = pipeline.in_epoch(first_epoch).input_shape
    example = torch.zeros(plan.microbatch_size if is_compiled else 2, *train_shape, device=world.device)
    settle_buckets(parallel, example)
    optimizer = build_optimizer(config.optim, parallel.module)
    average = build_average(config.optim, parallel.module, plan.steps_per_epoch)
    if load_weights:
        check_objective(config, plan, parallel, world)
    step = build_step(parallel, optimizer, average, config, world, guards, objective, freezing)
    step.begin_epoch(checkpoint.step if checkpoint is not None else 0)
    code = hash_code(config)  # after all of it was imported
    if code_references(config):
        require_same_functions(code, world)
    is_recorded = load_weights and world.is_primary
    record = make_record(config, data.info, parts, pipeline, is_marked=True) if is_recorded else None
    if load_weights:
        model_tensors(parallel.module)  # a state that cannot be saved is refused before the first step
        _warm_up(step, train_data, plan, first_epoch)
    return Components(
        plan=plan,
        train_data=train_data,
        validation_data=_open_validation(samples, train_data, world),
        test_data=Loader(data.test, torch.arange(len(data.test)), pipeline, world),
        model=parallel,
        optimizer=optimizer,
        average=average,
        step=step,
        data=samples.about,
        record=record,
        code=code,
    )


def _warm_up(step: TrainStep, train_data: Loader, plan: RunPlan, epoch: int) -> None:
    """Do one-time work on the device before the first step."""
    clock, pipeline = step.guards.start, train_data.pipeline
    clock.enter("compile_and_capture")
    train_data.warm_up(plan.rank_batch_size, epoch)
    shape = pipeline.in_epoch(epoch).input_shape
    inputs = torch.zeros(plan.rank_batch_size, *shape, device=train_data.device)
    step.warm_up(inputs, pipeline.empty_targets(len(inputs), plan.info, inputs.device))
    clock.enter("other")


def _start_from(model: nn.Module, source: Path, info: DatasetInfo) -> None:
    start_from(model, source, with_head=not was_for_other_classes(source, info))
