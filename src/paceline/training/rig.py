"""Everything a run stands on, put together in order: data, model, strategy, optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.manager import restore_training
from paceline.checkpoints.store import Checkpoint
from paceline.config.fields import flatten
from paceline.config.schema import Config
from paceline.data.augment import build_pipeline
from paceline.data.loader import Loader
from paceline.data.order import split_train_validation
from paceline.data.registry import load_dataset
from paceline.errors import CheckpointError
from paceline.models.registry import build_model
from paceline.parallel.apply import ParallelModel, parallelise
from paceline.training.optim import MovingAverage, build_optimizer
from paceline.training.plan import RunPlan, make_plan
from paceline.training.state import TrainState
from paceline.training.step import TrainStep
from paceline.world.detect import World
from paceline.world.seeds import require_determinism, seed_initial_weights

# A change in one of these makes another run of it, not a continuation.
_IDENTITY = (
    *("dataset", "num_samples", "input_size", "num_classes", "train_split", "model_name", "hidden_size"),
    *("optimizer", "global_batch_size", "seed"),
)


@dataclass
class Rig:
    """The live objects of a run on this rank."""

    plan: RunPlan
    train_data: Loader
    validation_data: Loader
    test_data: Loader
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None
    step: TrainStep

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.module.parameters())

    def average_values(self) -> dict[str, Tensor]:
        return self.average.named_values() if self.average else {}

    def state_json(self, state: TrainState) -> dict[str, Any]:
        """What goes into a checkpoint beside the tensors."""
        return {
            **state.to_json(),
            "steps_per_epoch": self.plan.steps_per_epoch,
            "world_size": self.plan.world_size,
            "strategy": self.model.strategy,
            "scaler": self.step.scaler.state_dict(),
            "identity": identity_of(self.plan.config),
        }

    def resume(self, checkpoint: Checkpoint) -> TrainState:
        """Take over everything a checkpoint holds."""
        saved, now = checkpoint.state.get("identity", {}), identity_of(self.plan.config)
        changed = [name for name in now if saved.get(name) != now[name]]
        if changed:
            lines = [f"{name}: saved {saved.get(name)!r}, now {now[name]!r}" for name in changed[:3]]
            raise CheckpointError(
                "this run cannot go on from that checkpoint",
                where=str(checkpoint.path),
                got="\n".join(lines),
                hint="give the values it was saved with, or start a new run in another --output-dir",
            )
        restore_training(checkpoint, self.model.module, self.optimizer, self.average_values())
        if self.step.scaler.is_enabled():
            self.step.scaler.load_state_dict(checkpoint.state["scaler"])
        return TrainState.from_json(checkpoint.state)


def identity_of(config: Config) -> dict[str, Any]:
    values = flatten(config)
    return {name: values[name] for name in _IDENTITY}


def build_rig(config: Config, world: World, *, load_weights: bool = True) -> Rig:
    if config.train.deterministic:
        require_determinism()
    data = load_dataset(config.data, config.train.seed)
    plan = make_plan(config, data.info, world.world_size)
    pipeline = build_pipeline(config.data, data.info, config.train.seed)
    train_ids, validation_ids = split_train_validation(len(data.train), config.data.train_split)
    train_data = Loader(data.train, train_ids, pipeline, world)

    seed_initial_weights(config.train.seed)
    model = build_model(config.model, plan.input_shape, data.info.num_classes, load_weights=load_weights)
    parallel = parallelise(model, config, world)
    optimizer = build_optimizer(config.optim, parallel.module)
    average = MovingAverage(parallel.module, config.optim.ema_decay) if config.optim.ema_decay else None
    return Rig(
        plan=plan,
        train_data=train_data,
        validation_data=train_data.on_part(validation_ids),
        test_data=Loader(data.test, torch.arange(len(data.test)), pipeline, world),
        model=parallel,
        optimizer=optimizer,
        average=average,
        step=TrainStep(parallel, optimizer, average, config, world),
    )
