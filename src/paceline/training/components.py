"""Everything a run stands on, put together in order: data, model, strategy, optimizer."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import paceline
from paceline.checkpoints.capture import Tensors, model_tensors, optimizer_tensors
from paceline.checkpoints.identity import (
    SILENT,
    require_same_run,
    warn_of_changed_code,
    warn_of_other_random_numbers,
)
from paceline.checkpoints.resume import reader_of, restore_training
from paceline.checkpoints.store import Checkpoint
from paceline.data.augment import build_pipeline
from paceline.data.dataset import Dataset
from paceline.data.loader import Loader
from paceline.data.order import split_train_validation
from paceline.data.shared import load_once_per_node
from paceline.errors import CheckpointError
from paceline.models.registry import build_model
from paceline.parallel.apply import ParallelModel, parallelise, settle_buckets
from paceline.parallel.buffers import average_rows, gather_own_buffers, running_statistics, set_own_buffers
from paceline.parallel.collectives import gather_texts
from paceline.runs.epoch_clock import EpochClock
from paceline.runs.trust import hash_code
from paceline.runtime.detect import World
from paceline.runtime.seeds import require_determinism, seed_initial_weights
from paceline.settings.code import CodeReference
from paceline.settings.fields import flatten
from paceline.settings.schema import Config
from paceline.training.compiling import choose_to_compile
from paceline.training.initial import start_from
from paceline.training.objective_check import check_objective
from paceline.training.optim import MovingAverage, build_optimizer
from paceline.training.plan import RunPlan, make_plan
from paceline.training.recorded_step import build_step
from paceline.training.run_data import RunData, agree_on_data, data_to_go_on_with, describe_split, split_again
from paceline.training.same_ranks import require_same_data
from paceline.training.sample_keys import RANDOM_NUMBERS
from paceline.training.state import TrainState
from paceline.training.step import TrainStep

_LOOKED_AT = 2000  # samples

_log = logging.getLogger("paceline")
_T = TypeVar("_T")


@dataclass
class Components:
    """The live objects of a run on this rank."""

    plan: RunPlan
    train_data: Loader
    validation_data: Loader
    test_data: Loader
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None
    step: TrainStep
    data: RunData
    code: dict[CodeReference, str]  # a hash of each file with functions of the user, as it was when it was imported
    samples: Dataset | None  # all that are not for the test; until a run knows which of them it trains on

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.module.parameters())

    def checkpoint_bytes(self) -> int:
        """About how large one checkpoint will be: weights, optimizer state, moving average."""
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.model.module.parameters())
        copies = 1 + (2 if "adam" in self.plan.config.optim.optimizer else 1) + (self.average is not None)
        return weights * copies

    def average_values(self) -> Tensors:
        return self.average.named_values() if self.average else {}

    def payload(self, world: World) -> dict[str, Tensors]:
        """Every tensor a resume needs, by kind. Collective where ranks have statistics of their own."""
        module = self.model.module
        payload = {"model": model_tensors(module), "optimizer": optimizer_tensors(module, self.optimizer)}
        rows = gather_own_buffers(module, world)
        if rows:
            # The model has the mean of the statistics, to be evaluated with; a resumed rank takes its own row.
            names = running_statistics(module).keys() & rows.keys()
            payload["model"].update({name: average_rows(rows[name]) for name in sorted(names)})
            payload["statistics"] = rows
        if self.average is not None:
            payload["ema"] = self.average_values()
        return payload

    def state_json(self, state: TrainState, *, keep: bool) -> dict[str, Any]:
        """What goes into a checkpoint beside the tensors."""
        return {
            **state.to_json(),
            "keep": keep,
            **self.plan.clock.to_json(),
            "scaler": self.step.scaler.state_dict(),
            "config": flatten(self.plan.config),
            "data": self.data.to_json(),
            "random_numbers": RANDOM_NUMBERS,
            "code": {item.name: digest for item, digest in self.code.items()},
        }

    def about(self, state: TrainState) -> dict[str, Any]:
        """What a checkpoint's manifest says of its origin."""
        return {
            "step": state.step,
            "world_size": self.plan.world_size,
            "strategy": self.model.strategy,
            "config_hash": hash_config(self.plan.config),
            "paceline": paceline.__version__,
            "torch": torch.__version__,
        }

    def resume(self, checkpoint: Checkpoint, world: World) -> TrainState:
        """Take over everything a checkpoint holds; refuse one of another run."""
        _compare_configs(checkpoint, self.plan)
        warn_of_changed_code(checkpoint, self.code)
        if self.model.draws_by_sample:
            warn_of_other_random_numbers(checkpoint, RANDOM_NUMBERS)
        state = _state_of(checkpoint)  # first: what cannot be used must not be half taken over
        self._take_data_of(checkpoint)
        restore_training(checkpoint, self.model.module, self.optimizer, self.average_values())
        if checkpoint.files_of("statistics"):
            rows = reader_of(checkpoint, "statistics")
            set_own_buffers(self.model.module, {name: rows.read(name) for name in rows.shapes}, world)
        self.step.forget_recordings()
        if self.step.scaler.is_enabled():
            self.step.scaler.load_state_dict(checkpoint.state["scaler"])
        return state

    def _take_data_of(self, checkpoint: Checkpoint) -> None:
        """Train and validate on the parts of the data that the checkpoint's run has them in."""
        plan = self.plan
        may_differ, has_validation = plan.config.run.accept_new_data, plan.num_validation > 0
        data = data_to_go_on_with(checkpoint, self.data, may_differ=may_differ, has_validation=has_validation)
        parts = plan.num_train, plan.num_validation
        if data.is_split_by_keys and not self.data.is_split_by_keys:
            assert self.samples is not None
            train, validation = split_again(self.samples, data)
            parts = len(train), len(validation)
            self.train_data, self.validation_data = (self.train_data.on_part(ids) for ids in (train, validation))
        self.plan = make_plan(plan.config, plan.info, plan.world_size, parts, _count_epochs_from(checkpoint))
        self.data = data


def _state_of(checkpoint: Checkpoint) -> TrainState:
    return _read_state(checkpoint, TrainState.from_json)


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


def _compare_configs(checkpoint: Checkpoint, plan: RunPlan) -> None:
    now = flatten(plan.config)
    for name in require_same_run(checkpoint, now, lanes=plan.lanes):
        saved = checkpoint.state["config"].get(name)
        _log.info("note: %s was %r when the checkpoint was saved, is %r now", name, saved, now[name])


def build_components(config: Config, world: World, *, load_weights: bool = True) -> Components:
    if config.train.deterministic or config.parallel.exact:
        require_determinism()
    else:
        torch.backends.cudnn.benchmark = True  # batches have one size: kernels are tried once, and the fastest taken
    data = load_once_per_node(config.data, config.train.seed, world, partial(gather_texts, world=world))
    require_same_data(data.fingerprint(), world)
    fingerprint = agree_on_data(data, world)
    plan = make_plan(config, data.info, world.world_size)
    pipeline = build_pipeline(config.data, data.info, config.train.seed)
    train_ids, validation_ids = split_train_validation(len(data.train), config.data.train_split)
    # Only the primary writes checkpoints.
    held_out = describe_split(data.train, train_ids, validation_ids) if world.is_primary and load_weights else None
    train_data = Loader(data.train, train_ids, pipeline, world)

    seed_initial_weights(config.train.seed)
    model = build_model(config.model, plan.input_shape, data.info.num_classes, load_weights=load_weights)
    if config.run.init_from and load_weights:
        start_from(model, Path(config.run.init_from))
    look_at: Any = getattr(model, "look_at", None)  # a model may take its first layer from the data
    if look_at is not None and load_weights:
        some = train_ids[: min(_LOOKED_AT, len(train_ids))]
        look_at(pipeline.for_evaluation(data.train.read(some)))
    is_compiled = load_weights and choose_to_compile(model, config, plan, world)
    parallel = parallelise(model, config, world, is_compiled=is_compiled)
    example = torch.zeros(plan.microbatch_size if is_compiled else 2, *plan.input_shape, device=world.device)
    settle_buckets(parallel, example)
    optimizer = build_optimizer(config.optim, parallel.module)
    average = MovingAverage(parallel.module, config.optim.ema_decay) if config.optim.ema_decay else None
    if load_weights:
        check_objective(config, plan, parallel, world)
    step = build_step(parallel, optimizer, average, config, world)
    code = hash_code(config)  # after all of it was imported
    if load_weights:
        model_tensors(parallel.module)  # a state that cannot be saved is refused before the first step
        train_data.warm_up(plan.rank_batch_size)
        step.warm_up(example.new_zeros(plan.rank_batch_size, *plan.input_shape))
    return Components(
        plan=plan,
        train_data=train_data,
        validation_data=train_data.on_part(validation_ids),
        test_data=Loader(data.test, torch.arange(len(data.test)), pipeline, world),
        model=parallel,
        optimizer=optimizer,
        average=average,
        step=step,
        data=RunData(fingerprint, held_out=held_out),
        code=code,
        samples=data.train,
    )
