"""`paceline train` and `paceline plan`. Functions import what they need, so that --help is fast."""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.cli.command import Command, RecipeSettings
from paceline.errors import EXIT_FINISHED, UserError


@dataclass(frozen=True)
class Train(RecipeSettings):
    """Train a recipe, on one process or on many.

    Every flag below is also a line of a recipe: `--global-batch-size 512` is `global_batch_size: 512`. Flags override
    the recipe. `--debug` shows tracebacks. `--trust-code` executes functions that another person's config.yaml names.
    """

    dry_run: bool = False
    """Print the plan, start nothing. The same as `paceline plan`."""
    quiet: bool = False
    """Print only warnings and the result."""
    json: bool = False
    """Print a row per epoch and one for the result on standard output, everything else on standard error."""


@dataclass(frozen=True)
class Plan(RecipeSettings):
    """Print what `paceline train` would do with the same recipe and flags. Nothing is started."""


def train(settings: Train) -> int:
    if settings.dry_run:
        return plan(settings)
    from paceline.cli.main import rank_main
    from paceline.launch.bytecode import keep_bytecode
    from paceline.launch.request import read_request
    from paceline.launch.start import start_training
    from paceline.metrics.screen import OUTPUT
    from paceline.runtime.open_files import require_open_files

    if settings.quiet and settings.json:
        raise UserError("--quiet and --json contradict each other", hint="--json with 2>/dev/null")
    if settings.quiet or settings.json:
        # Ranks read it from the environment: it is not part of the run, so no recipe holds it.
        os.environ[OUTPUT] = "quiet" if settings.quiet else "json"
    require_open_files()
    keep_bytecode()
    loaded = read_request(settings.recipe, settings.flags)
    return start_training(loaded, settings.as_arguments(), rank_main)


def plan(settings: RecipeSettings) -> int:
    from paceline.launch.plan_screen import show_plan
    from paceline.launch.request import read_request

    show_plan(read_request(settings.recipe, settings.flags))
    return EXIT_FINISHED


COMMANDS = (
    Command("train", Train, train, lists_recipe_flags=True),
    Command("plan", Plan, plan, lists_recipe_flags=True),
)
