"""The header and the summary of a run, as lines of text."""

from __future__ import annotations

import json
import shlex
from typing import Any

import torch

import paceline
from paceline.data.dataset import DatasetInfo
from paceline.metrics.console import format_seconds
from paceline.metrics.screen import BRIEF, output_mode
from paceline.models.external import PER_RANK, draws_per_rank
from paceline.runs.catalog import recipe_of
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.runtime.detect import World
from paceline.training.components import Components
from paceline.training.plan import RunPlan

_TOLD = (  # of results.json, which has all of it
    *("status", "test_accuracy", "test_loss", "best_epoch", "best_validation_accuracy", "steps", "training_seconds"),
    *("samples_per_second", "world_size", "strategy", "weights_sha256"),
)


def describe_run(components: Components, world: World, place: RunPlace) -> list[str]:
    """The header: one line per question. A restart was told of already; what may have changed is who rides."""
    plan = components.plan
    riders = f"{world}{_device_name(world.device)}"
    if place.is_restart:
        batch = [f"batch     {describe_batch(plan)}"] if plan.config.train.accumulate > 1 else []  # it may be new
        return [f"paceline  going on with {riders}", *batch]
    precision = str(components.model.autocast_dtype or "float32").removeprefix("torch.")
    return [
        f"paceline  {paceline.__version__}: {recipe_of(place.folder)} on {riders}",
        f"model     {plan.config.model.model_name}, {components.num_parameters:,} parameters,"
        f" strategy {components.model.strategy}{_way(components)}, {precision}",
        f"data      {describe_data(plan)}",
        f"batch     {describe_batch(plan)}",
        f"steps     {describe_steps(plan)}",
        *([f"random    {PER_RANK}"] if _draws_per_rank(plan) else []),
        *([] if RunFolder(place.folder).is_temporary else [f"folder    {place.folder}"]),
    ]


def _draws_per_rank(plan: RunPlan) -> bool:
    return draws_per_rank(plan.config.model.model_name, is_exact=plan.config.parallel.exact)


def _way(components: Components) -> str:
    return f" through {components.step.exchange}" if components.step.exchange == "shared memory" else ""


def _device_name(device: str) -> str:
    return f", {torch.cuda.get_device_name(device)}" if device.startswith("cuda") else ""


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
    if left_out:
        text += f"; each epoch leaves out {left_out} samples that do not fill a batch, different ones each time"
    return text + (f"; ends at step {plan.last_step}" if plan.last_step < plan.total_steps else "")


def describe_summary(results: dict[str, Any], folder: RunFolder, info: DatasetInfo) -> list[str]:
    told = [
        _accuracy_line(results),
        f"{results['steps']} steps in {format_seconds(results['training_seconds'])}"
        f" on {results['world_size']} rank{'s' if results['world_size'] > 1 else ''},"
        f" {results['samples_per_second']:,.0f} samples/s with validation and saving",
        *_limit_lines(results, folder),
    ]
    if folder.is_temporary:
        return told
    path = shlex.quote(str(folder.path))
    page = "report.html, " if folder.report.exists() else ""
    weights = "best" if results["best_epoch"] else "latest"
    commands = {
        **({f"paceline predict {path} PICTURE": "label pictures"} if info.takes_pictures else {}),
        f"paceline export {path} --format safetensors": "for other programs",
        "paceline runs": "all your runs",
    }
    widest = max(map(len, commands))
    told.append(f"everything is in {folder.path}: {page}results.json, metrics.csv, checkpoints/{weights}")
    if output_mode() == BRIEF:
        return told
    return ["", *told, "", *(f"  {command:<{widest}}  {text}" for command, text in commands.items())]


def _limit_lines(results: dict[str, Any], folder: RunFolder) -> list[str]:
    """What bounded the run, and where its traces are."""
    lines = []
    verdict = results["limits"]["verdict"]
    if verdict is not None:
        lines.append(f"limit     {verdict['text']}; next: {verdict['try']}")
    profile = results.get("profile")
    if "profile" in results and profile is None:
        lines.append("profile   nothing recorded: it begins after ten steps")
    elif profile is not None and not folder.is_temporary:
        last = profile["first_step"] + profile["steps"] - 1
        lines.append(
            f"profile   {folder.path / profile['folder']}: top.txt, and steps {profile['first_step']} to {last} of"
            " every rank to drop on https://ui.perfetto.dev"
        )
    return lines


def _accuracy_line(results: dict[str, Any]) -> str:
    own = "".join(f", {name} {value:.4f}" for name, value in results["test_metrics"].items())
    best = f"best epoch {results['best_epoch']}" if results["best_epoch"] else "weights of the last step"
    return f"test accuracy {results['test_accuracy']:.2%}, loss {results['test_loss']:.4f}{own} ({best})"


def tell_result(results: dict[str, Any], folder: RunFolder) -> None:
    """The one line of --quiet, or the last row of --json."""
    if output_mode() == "quiet":
        where = "" if folder.is_temporary else f"{folder.path}: "
        print(f"{where}{_accuracy_line(results)}", flush=True)
    elif output_mode() == "json":
        told = {name: results[name] for name in _TOLD}
        print(json.dumps({"kind": "result", "folder": str(folder.path), **told}), flush=True)
