"""Whether a checkpoint has used certain samples. A run without them may continue from it only if it has not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.checkpoints.store import Checkpoint
from paceline.data.changes import changed_samples
from paceline.data.dataset import Dataset
from paceline.data.order import samples_of
from paceline.data.sampling import Sampling, sampling_of
from paceline.errors import CheckpointError
from paceline.settings.schema import Config
from paceline.training.plan import RunPlan, split_samples

FIRST_LOOK_SAMPLES = 2000  # for a model that takes its first layer from the data
_LISTED = 5


@dataclass(frozen=True)
class Usage:
    """What decides when a run uses a sample first."""

    plan: RunPlan
    train_ids: Tensor
    validation_ids: Tensor  # with the excluded ones
    sampling: Sampling
    looks_at_data: bool  # the model takes its first layer from the first samples

    def first_use(self, samples: list[int]) -> int | None:
        """The first step (from 1) that depends on one of these samples. None: no step does.

        A validation decides which checkpoint is the best, so it counts as the step before it.
        """
        wanted, config = torch.tensor(samples, dtype=torch.int64), self.plan.config
        steps = []
        if bool(torch.isin(self.train_ids, wanted).any()):
            is_first = bool(torch.isin(self.train_ids[: FIRST_LOOK_SAMPLES + len(samples)], wanted).any())
            if config.objective.class_weights or (self.looks_at_data and is_first):
                return 1
            steps.append(self._first_step(wanted))
        if bool(torch.isin(self.validation_ids, wanted).any()):
            steps.append(self.plan.clock.end_of(1))
        used = [step for step in steps if step is not None and step <= self.plan.last_step]
        return min(used, default=None)

    def _first_step(self, wanted: Tensor) -> int | None:
        train, data = self.plan.config.train, self.plan.config.data
        order = replace(self.sampling, excluded=None)  # the places of the samples are the same with and without them
        for epoch in range(train.epochs):
            batches = order.batches(
                torch.arange(len(self.train_ids)), train.seed, epoch, train.global_batch_size, data.repeat_augment
            )
            ids = self.train_ids[samples_of(batches)]
            rows = torch.nonzero(torch.isin(ids, wanted).any(1))
            if len(rows):
                return self.plan.clock.end_of(epoch) + int(rows[0]) + 1
        return None


def require_unseen(checkpoint: Checkpoint, config: Config, usage: Usage) -> None:
    """CheckpointError if the checkpoint has used samples that this run leaves out, or has with another label."""
    saved = checkpoint.state["config"]
    then = replace(config.data, exclude=saved.get("exclude", ""), relabel=saved.get("relabel", ""))
    changed = changed_samples(then, config.data)
    first = usage.first_use(changed) if changed else None
    if first is not None and first <= checkpoint.step:
        raise CheckpointError(
            "this checkpoint has used samples that the run excludes or relabels",
            where=str(checkpoint.path),
            got=f"step {checkpoint.step}; {_named(changed)} first used at step {first}",
            allowed=f"a checkpoint before step {first}",
            hint="paceline replay RUN --without SAMPLES starts at the right one; or start a new run",
        )


def _named(samples: list[int]) -> str:
    names = ", ".join(map(str, samples[:_LISTED])) + (", ..." if len(samples) > _LISTED else "")
    return f"sample {names} is" if len(samples) == 1 else f"samples {names} are"


def find_usage(plan: RunPlan, train: Dataset, model: nn.Module) -> Usage:
    """Of a run whose samples are those that its settings give, not those of a checkpoint."""
    ids, validation = split_samples(plan.info, plan.config)
    held_out = validation[:0] if plan.info.num_validation else validation  # one of its own has other numbers
    return Usage(plan, ids, held_out, sampling_of(plan.config.data, train, ids), looks_at_data(model))


def looks_at_data(model: nn.Module) -> bool:
    return getattr(model, "look_at", None) is not None
