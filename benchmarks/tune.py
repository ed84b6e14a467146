"""Compare variants of a recipe over many seeds: learning rate, batch, epochs.

    python benchmarks/tune.py cifar10-speedrun "" "base-lr=0.26" "base-lr=0.26 global-batch-size=1920" --data-dir data

A variant is a string of flags without their dashes. Its model is built and compiled once. Every seed resets the weights
and trains with the recipe's data, steps and evaluation, but without checkpoints, output and run folder. For final
numbers use benchmarks/speedrun.py, which runs the complete trainer.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

import torch

from paceline.models.registry import build_model
from paceline.runtime.detect import ALONE, World, build_world
from paceline.runtime.seeds import seed_initial_weights
from paceline.settings.load import load_config
from paceline.settings.schema import Config
from paceline.training.components import Components, build_components
from paceline.training.evaluate import Evaluation, evaluate

_LOOKED_AT = 2000  # samples, as in a run


@torch.no_grad()
def start_over(components: Components, config: Config, seed: int) -> None:
    """Copy new weights into the existing tensors, so that compiled code and CUDA graphs stay valid."""
    seed_initial_weights(seed)
    fresh = build_model(config.model, components.plan.input_shape, components.plan.info.num_classes)
    loader = components.train_data
    look_at: Any = getattr(fresh, "look_at", None)
    if look_at is not None:
        look_at(loader._pipeline.for_evaluation(loader._dataset.read(loader.ids[:_LOOKED_AT]).cpu()))
    for own, new in zip(components.model.module.state_dict().values(), fresh.state_dict().values(), strict=True):
        own.copy_(new)
    for state in components.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    loader._pipeline = dataclasses.replace(loader._pipeline, seed=seed)


def train_once(
    components: Components, config: Config, world: World, seed: int, *, steps: int | None
) -> tuple[float, Evaluation]:
    """Seconds of training, and the evaluation."""
    start_over(components, config, seed)
    plan, step = components.plan, 0
    last_step = min(plan.last_step, steps or plan.last_step)
    _wait(world)
    began = time.perf_counter()
    while step < last_step:
        batches = components.train_data.train_epoch(
            seed=seed,
            epoch=step // plan.steps_per_epoch,
            global_batch_size=config.train.global_batch_size,
            first_step=0,
        )
        for batch in batches:
            report = components.step.gradients(batch, step, wants_stop=False)
            components.step.update(step, plan.learning_rate(step), report)
            step += 1
            if step == last_step:
                break
    _wait(world)
    seconds = time.perf_counter() - began
    found = evaluate(
        components.model,
        components.test_data,
        world,
        num_classes=plan.info.num_classes,
        batch_size=config.train.test_batch_size,
        objective=components.step.objective,
        views=config.train.test_views,
    )
    return seconds, found


def _wait(world: World) -> None:
    if world.device.startswith("cuda"):
        torch.cuda.synchronize()


def try_variant(recipe: str, flags: list[str], seeds: int, *, steps: int | None) -> str:
    config = load_config(recipe, [*flags, "--processes=1"]).config
    world = build_world(config.parallel, ALONE)
    if world.device.startswith("cuda"):
        torch.cuda.set_device(world.device)
    components = build_components(config, world)
    runs = [train_once(components, config, world, seed, steps=steps) for seed in range(seeds)]
    accuracies = [found.accuracy for _, found in runs]
    spread = statistics.stdev(accuracies) if seeds > 1 else 0.0
    return (
        f"| {statistics.fmean(accuracies):.3%} | {spread:.3%} | {statistics.fmean(found.loss for _, found in runs):.4f}"
        f" | {statistics.median(seconds for seconds, _ in runs):.3f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("variants", nargs="*", default=[""], help='as "base-lr=0.3 epochs=8"')
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, help="stop early, for a quick check")
    given = parser.parse_intermixed_args()
    print("| variant | mean accuracy | standard deviation | test loss | median training |\n|---|---|---|---|---|")
    for variant in given.variants:
        flags = [f"--data-dir={given.data_dir}", *(f"--{flag}" for flag in variant.split())]
        row = try_variant(given.recipe, flags, given.seeds, steps=given.steps)
        print(f"| {variant or 'as it is'} {row}", flush=True)


if __name__ == "__main__":
    main()
