"""Rebuilds one step of a run: batch, loss of each sample, gradients by layer. And follows samples over checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoints.resume import restore_weights
from paceline.checkpoints.store import open_checkpoint
from paceline.data.draws import draw_permutation
from paceline.metrics.step_trace import UNKNOWN, Numbers, read_trace
from paceline.parallel.apply import autocast
from paceline.runs.folder import RunFolder
from paceline.settings.tasks import SINGLE_LABEL
from paceline.training.evaluate import average_over_views
from paceline.training.losses import BuiltInLoss
from paceline.training.replay import RanksOfRun, Replay, ReplayedStep
from paceline.training.step import cut

_SURE = 0.9  # a probability of another class from which on a label is doubted
_DRAW = 11  # keeps the choice of samples apart from other draws


@dataclass(frozen=True)
class StepView:
    """A step, as it was before its update."""

    start: int  # the checkpoint that the replay started from
    taken: ReplayedStep
    recorded: Numbers | None  # loss and gradient norm, as the run has recorded them
    losses: list[float]  # of each sample; NaN if the loss function returns a mean only
    gradient_norms: dict[str, float]  # by parameter, before clipping
    ranks: RanksOfRun


def rebuild_step(replay: Replay, step: int, say: Callable[[str], None]) -> StepView:
    """Replay a run up to this step, from the nearest checkpoint."""
    start = replay.nearest_start(step)
    replay.start_at(start)
    say(f"replaying {step - start} steps from step {start}")
    for _ in replay.steps(step - 1):
        pass
    before = copy.deepcopy(replay.components.model.module.state_dict())
    norms: dict[str, float] = {}

    def note_norms() -> None:
        norms.update({name: float(value.norm()) for name, value in replay.gradients().items()})

    replay.before_update = note_norms
    (taken,) = replay.steps(step)
    replay.before_update = None
    replay.components.model.module.load_state_dict(before)
    trace = read_trace(RunFolder(replay.run).steps)
    recorded = trace[step - 1] if step <= len(trace) and trace[step - 1] != UNKNOWN else None
    return StepView(start, taken, recorded, losses_of(replay, taken), norms, replay.trained)


@torch.no_grad()
def losses_of(replay: Replay, taken: ReplayedStep) -> list[float]:
    """The loss of each sample of a step, in its lane and with its dropout. The weights are those before the step."""
    components, batch = replay.components, taken.batch
    step, model, loss = components.step, components.model, components.step.objective.loss
    model.module.train()
    step.begin_epoch(taken.step - 1)
    whole = step.share_of(batch, taken.step - 1)
    losses: list[float] = []
    for lane, part in enumerate(cut(whole, step.lanes_per_rank)):
        step.seed(taken.step - 1, lane)
        with autocast(model, replay.session.world):
            logits = model(part.inputs, part.keys).float()
        values = loss.per_sample(logits, part.labels) if isinstance(loss, BuiltInLoss) else loss(logits, part.labels)
        is_per_sample = values.numel() == len(part.labels)
        losses += values.flatten().tolist() if is_per_sample else [float("nan")] * len(part.labels)
    return losses


@dataclass(frozen=True)
class Answers:
    """What the weights of some checkpoints say of training samples. Rows are checkpoints, columns are samples."""

    steps: list[int]
    ids: Tensor
    labels: Tensor
    predicted: Tensor  # classes
    predicted_share: Tensor  # their probability
    label_share: Tensor  # the probability of the label

    @property
    def is_right(self) -> Tensor:
        return self.predicted == self.labels

    def forgotten(self) -> Tensor:
        """How often a sample was right at one checkpoint and wrong at the next."""
        right = self.is_right
        return (right[:-1] & ~right[1:]).sum(0)

    def never_learned(self) -> Tensor:
        return ~self.is_right.any(0)

    def probably_mislabelled(self) -> Tensor:
        """At the last checkpoint the model is sure of another class, and the label was never likely."""
        is_sure = (self.predicted_share[-1] >= _SURE) & ~self.is_right[-1]
        return is_sure & (self.label_share.max(0).values < 0.5)


def choose_samples(replay: Replay, count: int, always: list[int]) -> Tensor:
    """Training samples to follow: those of `always`, and others by a draw, ascending."""
    ids = replay.components.train_data.ids
    drawn = ids[draw_permutation(len(ids), _DRAW)[:count]]
    chosen: Tensor = torch.cat([drawn, torch.tensor(always, dtype=torch.int64)]).unique()
    return chosen


@torch.no_grad()
def answers_over_time(replay: Replay, ids: Tensor, say: Callable[[str], None]) -> Answers | None:
    """Evaluate samples with the weights of each stored checkpoint. None if there are none, or for other tasks."""
    components, config = replay.components, replay.session.config
    if not replay.stored or components.plan.info.task != SINGLE_LABEL:
        return None
    model, world = components.model, replay.session.world
    data = components.train_data.on_part(ids)
    model.module.eval()
    rows: list[tuple[Tensor, ...]] = []
    for step, path in replay.stored.items():
        say(f"evaluating {len(ids):,} training samples at step {step}")
        restore_weights(open_checkpoint(path), model.module)
        parts = []
        for batch in data.evaluation_batches(config.train.test_batch_size):
            with autocast(model, world):
                logits = average_over_views(model.module, batch.inputs, config.train.test_views)
            shares = logits.float().softmax(1).cpu()
            best = shares.max(1)
            own = shares.gather(1, batch.labels.cpu()[:, None])[:, 0]
            parts.append((best.indices, best.values, own))
        rows.append(tuple(torch.cat(column) for column in zip(*parts, strict=True)))
    labels = torch.cat([batch.labels.cpu() for batch in data.evaluation_batches(config.train.test_batch_size)])
    predicted, predicted_share, label_share = (torch.stack([row[column] for row in rows]) for column in range(3))
    return Answers(list(replay.stored), ids, labels, predicted, predicted_share, label_share)
