"""The header of a run, as lines of text: ranks, model, data, batch, steps."""

from __future__ import annotations

import torch

import paceline
from paceline.data.parts import TEST, TRAIN, VALIDATION
from paceline.models.external import PER_RANK, draws_per_rank, has_random_operations
from paceline.runs.catalog import recipe_of
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.runtime.detect import World
from paceline.training.components import Components
from paceline.training.plan import RunPlan


def describe_run(components: Components, world: World, place: RunPlace) -> list[str]:
    """The header. A restart has a short one: only the ranks and the microbatches may have changed."""
    plan = components.plan
    ranks = f"{world}{_device_name(world.device)}"
    if place.is_restart:
        batch = (
            [f"batch     {describe_batch(plan)}"] if plan.config.train.accumulate > 1 else []
        )  # --auto-microbatch may have changed it
        return [f"paceline  going on with {ranks}", *batch]
    precision = str(components.model.autocast_dtype or "float32").removeprefix("torch.")
    return [
        f"paceline  {paceline.__version__}: {recipe_of(place.folder)} on {ranks}",
        f"model     {plan.config.model.model_name}, {components.num_parameters:,} parameters,"
        f" strategy {components.model.strategy}{_way(components)}, {precision}",
        f"data      {describe_data(plan)}",
        *([f"augment   {components.train_data.pipeline.describe()}"] if plan.info.is_image else []),
        f"batch     {describe_batch(plan)}",
        f"steps     {describe_steps(plan)}",
        *([f"random    {PER_RANK}"] if _draws_per_rank(components) else []),
        *([] if RunFolder(place.folder).is_temporary else [f"folder    {place.folder}"]),
    ]


def _draws_per_rank(components: Components) -> bool:
    config = components.plan.config
    is_possible = draws_per_rank(config.model.model_name, is_exact=config.parallel.exact)
    return is_possible and has_random_operations(components.model.module)


def _way(components: Components) -> str:
    return f" through {components.step.exchange}" if components.step.exchange == "shared memory" else ""


def _device_name(device: str) -> str:
    return f", {torch.cuda.get_device_name(device)}" if device.startswith("cuda") else ""


def describe_data(plan: RunPlan) -> str:
    info = plan.info
    folders = dict(info.folders)
    validation = "own set" if info.num_validation else f"held out of {folders[TRAIN]}" if folders else ""
    origins = {**folders, VALIDATION: folders.get(VALIDATION, validation if plan.num_validation else "")}
    sizes = {TRAIN: plan.num_train, VALIDATION: plan.num_validation, TEST: info.num_test}
    parts = ", ".join(
        f"{size:,} {part}" + (f" ({origins[part]})" if origins.get(part) else "") for part, size in sizes.items()
    )
    skipped = f"; {info.num_skipped} skipped, listed by paceline data check" if info.num_skipped else ""
    inputs = "x".join(map(str, plan.input_shape))
    return f"{info.name}: {parts} samples, {info.num_classes} classes, inputs {inputs}{skipped}"


def describe_batch(plan: RunPlan) -> str:
    accumulate = plan.config.train.accumulate
    parts = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''} x {plan.rank_batch_size}"
    parts += f" ({accumulate} microbatches of {plan.microbatch_size})" if accumulate > 1 else ""
    return f"{plan.config.train.global_batch_size} = {parts}; peak learning rate {plan.peak_lr:g}"


def describe_steps(plan: RunPlan) -> str:
    left_out = plan.num_train - plan.steps_per_epoch * plan.config.train.global_batch_size
    epochs = plan.config.train.epochs
    text = f"{epochs} epoch{'s' if epochs > 1 else ''} of {plan.steps_per_epoch}, {plan.total_steps} in all"
    if left_out:
        samples = "1 sample that does" if left_out == 1 else f"{left_out} samples that do"
        text += f"; each epoch leaves out {samples} not fill a batch, different ones each time"
    return text + (f"; ends at step {plan.last_step}" if plan.last_step < plan.total_steps else "")
