"""What a run would be without some samples, or with other labels: which steps to train again, and what changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoints.format import DamagedCheckpoint, step_folders, step_of
from paceline.checkpoints.store import inspect_checkpoint
from paceline.data.changes import changed_samples, excluded_samples, with_new_labels
from paceline.data.dataset import LoadedData
from paceline.data.loader import Loader
from paceline.data.registry import load_dataset
from paceline.errors import UserError
from paceline.models.registry import build_model
from paceline.parallel.apply import autocast
from paceline.runs.patience import UnreadableNow
from paceline.settings.load import LoadedConfig
from paceline.settings.samples import shorten
from paceline.training.evaluate import average_over_views
from paceline.training.plan import make_plan, split_samples
from paceline.training.reuse import OpenRun, load_test_data, open_run
from paceline.training.unseen import find_usage


@dataclass(frozen=True)
class Cost:
    """What it takes to train a run again without some samples."""

    samples: list[int]
    first_use: int | None  # a step, from 1; None: no step uses them
    start: int  # the checkpoint to continue from; 0: the initial weights
    last_step: int

    @property
    def steps(self) -> int:
        return self.last_step - self.start if self.first_use is not None else 0

    def describe(self) -> list[str]:
        names = shorten(self.samples)
        names = names if len(names) < 60 else f"{names[:57]}..."
        if self.first_use is None:
            return [f"samples   {names}: no step uses them. The run never saw them."]
        where = f"the checkpoint of step {self.start}" if self.start else "the initial weights"
        return [
            f"samples   {names}: first used at step {self.first_use}",
            f"from      {where}: {self.steps:,} of {self.last_step:,} steps are trained again",
        ]


def name_samples(given: str, data: LoadedData) -> str:
    """Sample numbers of a text: numbers, a file of numbers, or a file with names of pictures, one per line."""
    names = getattr(data.train, "names", None)
    path = Path(given)
    if names is None or not path.is_file():
        return given
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    if all(set(line) <= set("0123456789,- ") for line in lines):
        return given
    places = {name.decode(errors="replace"): number for number, name in enumerate(names())}
    missing = [line for line in lines if line not in places]
    if missing:
        raise UserError(
            "these training samples do not exist",
            where=given,
            got=", ".join(missing[:4]),
            allowed=f"names such as {next(iter(places), '')}, or numbers from 0 to {len(places) - 1}",
        )
    return shorten(places[line] for line in lines)


def find_cost(run: Path, before: LoadedConfig, after: LoadedConfig, data: LoadedData | None = None) -> Cost:
    """`before`: the settings of the run; `after`: the same with other `exclude` or `relabel`."""
    config = before.config
    data = data or load_dataset(config.data, config.train.seed)
    train, _ = split_samples(data.info, config)
    excluded_samples(data, after.config.data, train)  # they exist
    with_new_labels(data, after.config.data)
    lanes = config.parallel.lanes or 1
    plan = make_plan(replace(config, parallel=replace(config.parallel, lanes=lanes)), data.info, 1)
    with torch.device("meta"):
        model = build_model(config.model, plan.input_shape, data.info.num_classes, load_weights=False)
    usage = find_usage(plan, data.train, model)
    samples = changed_samples(config.data, after.config.data)
    first = usage.first_use(samples) if samples else None
    return Cost(samples, first, _find_start(run, first), plan.last_step)


def _find_start(run: Path, first_use: int | None) -> int:
    """The last usable checkpoint before the first use. It must know its best checkpoint, if it has one."""
    steps = {step_of(path): path for path in step_folders(run / "checkpoints")}
    for step in sorted(steps, reverse=True):
        if first_use is not None and step >= first_use:
            continue
        try:
            best = int(inspect_checkpoint(steps[step]).state.get("best_step", 0))
        except (DamagedCheckpoint, UnreadableNow):
            continue
        if best in (0, *steps):
            return step
    return 0


def train_arguments(run: Path, cost: Cost, after: LoadedConfig, output: Path, lanes: int, more: list[str]) -> list[str]:
    """The arguments of `paceline` that train the run again."""
    data = after.config.data
    arguments = ["train", str(run / "config.yaml"), "--output-dir", str(output)]
    arguments += ["--exclude", data.exclude] if data.exclude else []
    arguments += ["--relabel", data.relabel] if data.relabel else []
    arguments += ["--resume", str(run / "checkpoints" / f"step-{cost.start:08}")] if cost.start else []
    arguments += ["--lanes", str(lanes)] if lanes else []
    return [*arguments, *more]


@dataclass(frozen=True)
class Answers:
    """Probabilities of the classes, a row for each sample."""

    test: Tensor
    test_labels: Tensor
    changed: Tensor  # of the samples that were excluded or relabelled
    changed_labels: Tensor  # as the first run had them


def compare_answers(before: Path, after: Path, samples: list[int]) -> list[str]:
    """How the answers of two runs differ, for a person: on the test set, and on the samples themselves."""
    one, other = (_answers(open_run(path, []), samples) for path in (before, after))
    classes = open_run(before, []).classes
    then, now = one.test.argmax(1), other.test.argmax(1)
    moved = torch.nonzero(then != now)[:, 0].tolist()
    lines = [f"test      {len(moved)} of {len(then):,} predictions are another class"]
    for number in moved[:5]:
        label = classes[int(one.test_labels[number])]
        was, is_now = classes[int(then[number])], classes[int(now[number])]
        lines.append(f"          test sample {number} ({label}): {was} -> {is_now}")
    places = torch.arange(len(samples))
    shares = [float(run.changed[places, run.changed_labels].mean()) for run in (one, other)]
    right = [int((run.changed.argmax(1) == run.changed_labels).sum()) for run in (one, other)]
    lines.append(
        f"samples   of {len(samples)}, {right[0]} -> {right[1]} are predicted with their label;"
        f" its mean probability: {shares[0]:.3f} -> {shares[1]:.3f}"
    )
    return lines


@torch.no_grad()
def _answers(run: OpenRun, samples: list[int]) -> Answers:
    test = load_test_data(run)
    data = load_dataset(run.config.data, run.config.train.seed)
    train = Loader(data.train, torch.tensor(samples, dtype=torch.int64), run.record.pipeline, run.world)
    run.model.module.eval()
    labels = torch.cat([batch.labels.cpu() for batch in test.evaluation_batches(run.config.train.test_batch_size)])
    return Answers(_probabilities(run, test), labels, _probabilities(run, train), data.train.labels[samples])


def _probabilities(run: OpenRun, data: Loader) -> Tensor:
    rows = []
    for batch in data.evaluation_batches(run.config.train.test_batch_size):
        with autocast(run.model, run.world):
            logits = average_over_views(run.model.module, batch.inputs, run.config.train.test_views)
        rows.append(logits.float().softmax(1).cpu())
    return torch.cat(rows)
