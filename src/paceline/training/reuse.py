"""A finished run, opened again to be tested or asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.checkpoints.format import STATE
from paceline.checkpoints.identity import warn_of_changed_code
from paceline.checkpoints.named import find_named
from paceline.checkpoints.resume import require_checkpoint, restore_weights
from paceline.checkpoints.store import Checkpoint, open_checkpoint
from paceline.data.augment import build_pipeline
from paceline.data.known_files import require_data_folder
from paceline.data.sources.folder import read_picture
from paceline.errors import CheckpointError, UserError
from paceline.runs.trust import TRUST_FLAG, require_trusted_code, require_trusted_run, trusting_code
from paceline.runtime.detect import ALONE, World, build_world
from paceline.settings.load import LoadedConfig, load_config, load_saved
from paceline.settings.rules import check_config
from paceline.settings.schema import Config
from paceline.settings.values import Setting
from paceline.training.components import Components, build_components
from paceline.training.evaluate import Evaluation, average_over_views, evaluate
from paceline.training.step import autocast


@dataclass(frozen=True)
class OpenRun:
    config: Config
    world: World
    checkpoint: Checkpoint
    components: Components
    folder: Path | None  # the run folder; None for a checkpoint without one


def open_run(
    path: Path, flags: Sequence[str | Setting], *, checkpoint: str | int = "", trust_code: bool = False
) -> OpenRun:
    """The weights of a run on one process: the best (the latest, if it ended before its first epoch did), or those of
    `checkpoint`: best, latest or a step. `path` may be a checkpoint folder too, also one without its run.

    Code that the run names is executed only if this user trained the run here, or trusts it.
    """
    named = find_named(path, checkpoint)
    given = [flag for flag in flags if flag != TRUST_FLAG]
    with trusting_code(trust_code or TRUST_FLAG in flags):
        if named.run is not None:
            require_trusted_run(named.run)
            loaded = load_config(str(named.run / "config.yaml"), given)
        else:
            loaded = _load_config_of(named.source, given)
            require_trusted_code(named.source, loaded.config)
    check_config(loaded)
    require_data_folder(loaded.config.data, where=loaded.where("data_dir"))
    # Whatever the run was trained on, one process evaluates it.
    alone = dataclasses.replace(loaded.config.parallel, strategy="single", processes="1", cpu_offload=False)
    config = dataclasses.replace(loaded.config, parallel=alone)
    world = build_world(config.parallel, ALONE)
    torch.set_num_threads(world.threads)
    found = require_checkpoint(named.source, world, prefer_best=named.prefer_best)
    components = build_components(config, world, load_weights=False)
    warn_of_changed_code(found, components.code)
    restore_weights(found, components.model.module)
    return OpenRun(config, world, found, components, named.run)


def _load_config_of(folder: Path, flags: Sequence[str | Setting]) -> LoadedConfig:
    """A checkpoint holds the config it was trained with."""
    config = open_checkpoint(folder).state.get("config")
    if not isinstance(config, dict):
        raise CheckpointError("this checkpoint does not say how it was trained", where=str(folder))
    return load_saved(config, folder / STATE, flags)


def evaluate_run(run: OpenRun) -> Evaluation:
    return evaluate(
        run.components.model,
        run.components.test_data,
        run.world,
        num_classes=run.components.plan.info.num_classes,
        batch_size=run.config.train.test_batch_size,
        objective=run.components.step.objective,
        shares_per_rank=run.components.step.lanes_per_rank,
        views=run.config.train.test_views,
    )


@torch.no_grad()
def predict_pictures(run: OpenRun, pictures: list[Path]) -> list[list[float]]:
    """Class probabilities of each picture: prepared, cut into batches and averaged over views as evaluation does it."""
    info = run.components.plan.info
    if not info.takes_pictures:
        raise UserError("this run was not trained on pictures", got=f"samples of shape {info.sample_shape}")
    pipeline = build_pipeline(run.config.data, info, run.config.train.seed)
    model, train = run.components.model, run.config.train
    model.module.eval()
    probabilities: list[list[float]] = []
    for start in range(0, len(pictures), train.test_batch_size):
        batch = pictures[start : start + train.test_batch_size]
        samples = torch.stack([read_picture(picture, info.sample_shape[1]) for picture in batch])
        if info.sample_shape[0] == 1:
            samples = samples.float().mean(1, keepdim=True).round().to(torch.uint8)
        inputs = pipeline.for_evaluation(samples.to(run.world.device))
        with autocast(model, run.world):
            logits = average_over_views(model.module, inputs, train.test_views).float()
        probabilities += logits.softmax(1).tolist()
    return probabilities
