"""`paceline train`, `plan` and `recipes`. Functions import what they need, so that --help is fast."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.command import Command, RecipeSettings
from paceline.errors import EXIT_FINISHED, UserError
from paceline.settings.load import LoadedConfig
from paceline.settings.recipe_file import shipped_recipes
from paceline.training.export_request import ExportFormat, check_packages


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
    export: ExportFormat | None = None
    """When the run is finished, write its best weights and a model card to RUN/export-FORMAT, as `paceline export`."""


@dataclass(frozen=True)
class Plan(RecipeSettings):
    """Print what `paceline train` would do with the same recipe and flags. Nothing is started."""


def train(settings: Train) -> int:
    if settings.dry_run:
        return plan(settings)
    from paceline.cli.main import rank_main
    from paceline.launch.request import read_request
    from paceline.launch.start import start_training
    from paceline.metrics.screen import OUTPUT
    from paceline.runs.interpreter import keep_bytecode
    from paceline.runtime.resources import require_open_files

    if settings.quiet and settings.json:
        raise UserError("--quiet and --json contradict each other", hint="--json with 2>/dev/null")
    if settings.quiet or settings.json:
        # Ranks read it from the environment: it is not part of the run, so no recipe holds it.
        os.environ[OUTPUT] = "quiet" if settings.quiet else "json"
    require_open_files()
    keep_bytecode()
    loaded = read_request(settings.recipe, settings.flags)
    if settings.export is not None:
        _check_export(settings.export, loaded)
    ended = start_training(loaded, settings.as_arguments(), rank_main)
    if settings.export is not None and ended.exit_code == EXIT_FINISHED and ended.folder is not None:
        _export(ended.folder, settings.export)
    return ended.exit_code


def _check_export(format_name: ExportFormat, loaded: LoadedConfig) -> None:
    """Refuse before the training what would fail after it."""
    from paceline.runtime.detect import read_rank_environment

    check_packages(format_name, where=f"--export {format_name}")
    if loaded.config.run.rehearse:
        raise UserError("a rehearsal has no model to export", got="--rehearse with --export", hint="leave one out")
    environment = read_rank_environment()
    if environment is not None:
        raise UserError(
            "--export is for runs that paceline itself starts",
            where="--export",
            got=f"a rank of {environment.launcher}",
            hint=f"after the run: paceline export RUN --format {format_name}",
        )


def _export(folder: Path, format_name: ExportFormat) -> None:
    from paceline.metrics.screen import say
    from paceline.training.export import export_run
    from paceline.training.export_request import check_output, default_output

    output = default_output(folder, format_name)
    check_output(output, is_forced=True)  # an earlier export of this run, which was continued
    for line in export_run(folder, format_name, output, []):
        say(line)


def plan(settings: RecipeSettings) -> int:
    from paceline.launch.plan_screen import show_plan
    from paceline.launch.request import read_request

    loaded = read_request(settings.recipe, settings.flags)
    show_plan(loaded)
    for line in _cost_of_replay(loaded):
        print(line)
    return EXIT_FINISHED


def _cost_of_replay(loaded: LoadedConfig) -> list[str]:
    """For the config.yaml of a run with other samples: what `paceline replay` would train again."""
    run = loaded.recipe_path.parent
    is_changed = any(loaded.origin(name) == "flag" for name in ("exclude", "relabel"))
    if loaded.recipe_path.name != "config.yaml" or not (run / "checkpoints").is_dir() or not is_changed:
        return []
    from paceline.settings.load import load_config
    from paceline.tools.trust.without import find_cost

    cost = find_cost(run, load_config(str(loaded.recipe_path), []), loaded)
    return ["", f"paceline replay {run}:", *(f"  {line}" for line in cost.describe())]


@dataclass(frozen=True)
class Recipes:
    """List the recipes that come with paceline."""


def recipes(settings: Recipes) -> int:
    for name, path in shipped_recipes().items():
        print(f"{name:<18} {_headline(path)}")
    return EXIT_FINISHED


def _headline(path: Path) -> str:
    """The first comment line of a recipe describes it."""
    return path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()


COMMANDS = (
    Command("train", Train, train, lists_recipe_flags=True),
    Command("plan", Plan, plan, lists_recipe_flags=True),
    Command("recipes", Recipes, recipes),
)
