"""The header and the summary of a run, as lines of text."""

from __future__ import annotations

from typing import Any

import paceline
from paceline.metrics.console import format_seconds
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.training.plan import RunPlan
from paceline.training.rig import Rig
from paceline.world.detect import World


def describe_run(rig: Rig, world: World, place: RunPlace) -> list[str]:
    plan = rig.plan
    precision = str(rig.model.autocast_dtype or "float32").removeprefix("torch.")
    return [
        f"paceline  {paceline.__version__}: {world}; strategy {rig.model.strategy}, {precision}",
        f"data      {describe_data(plan)}",
        f"model     {plan.config.model.model_name}, {rig.num_parameters:,} parameters",
        f"batch     {describe_batch(plan)}",
        f"steps     {describe_steps(plan)}",
        f"folder    {place.folder}",
    ]


def describe_data(plan: RunPlan) -> str:
    info = plan.info
    parts = f"{plan.num_train:,} train, {plan.num_validation:,} validation, {info.num_test:,} test"
    return f"{info.name}: {parts} samples, {info.num_classes} classes, inputs {'x'.join(map(str, plan.input_shape))}"


def describe_batch(plan: RunPlan) -> str:
    accumulate = plan.config.train.accumulate
    parts = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''} x {plan.rank_batch_size}"
    parts += f" ({accumulate} microbatches of {plan.microbatch_size})" if accumulate > 1 else ""
    return f"{plan.config.train.global_batch_size} = {parts}; peak learning rate {plan.peak_lr:g}"


def describe_steps(plan: RunPlan) -> str:
    left_out = plan.num_train - plan.steps_per_epoch * plan.config.train.global_batch_size
    text = f"{plan.config.train.epochs} epochs of {plan.steps_per_epoch}, {plan.total_steps} in all"
    text += f"; {left_out} samples sit out each epoch, others every time" if left_out else ""
    return text + (f"; ends at step {plan.last_step}" if plan.last_step < plan.total_steps else "")


def describe_summary(results: dict[str, Any], folder: RunFolder) -> list[str]:
    best = f"best epoch {results['best_epoch']}" if results["best_epoch"] else "weights of the last step"
    return [
        "",
        f"test accuracy {results['test_accuracy']:.2%}, loss {results['test_loss']:.4f} ({best})",
        f"{results['steps']} steps in {format_seconds(results['training_seconds'])}"
        f" on {results['world_size']} rank{'s' if results['world_size'] > 1 else ''},"
        f" {results['samples_per_second']:,.0f} samples/s with validation and saving",
        f"everything is in {folder.path}: results.json, metrics.csv, config.yaml, checkpoints/best",
        "",
        f"  paceline evaluate {folder.path}           test the best weights again",
        f"  paceline predict {folder.path} PICTURE    label your own pictures",
        f"  tensorboard --logdir {folder.path}        look at the curves",
        *([f"  {folder.report}    all of it on one page, for a browser"] if folder.report.exists() else []),
    ]
