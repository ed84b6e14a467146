"""`paceline sweep`: train a recipe with several values of some settings, and compare the results."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from paceline.cli.command import Command, RecipeSettings
from paceline.errors import EXIT_FINISHED, UserError
from paceline.launch.job import JobSpec, SlurmFlags, parse_job
from paceline.settings.declare import Arg, FlagsOf, Range
from paceline.settings.values import Setting
from paceline.tools.study.grid import recipe_argument
from paceline.tools.study.shared_settings import shared_settings
from paceline.tools.study.sweep import (
    SEED,
    TAKEN,
    SweepSpec,
    continue_sweep,
    flags_of,
    make_points,
    parse_axes,
    write_sweep,
)

if TYPE_CHECKING:  # imported late: --help must be fast
    from paceline.settings.load import LoadedConfig
    from paceline.tools.study.cells import CellState

# Flags of a job that the sweep decides.
_SET_BY_SWEEP = ("array", "start", "max_requeues", "signal_notice_s")


@dataclass(frozen=True)
class Sweep(RecipeSettings):
    """Train a recipe with every combination of some settings, and say which is best.

        paceline sweep shapes-cnn base_lr=0.1,0.2 weight_decay=0,5e-4 seed=1..3
        paceline sweep shapes-cnn base_lr=0.01..1 seed=1..3 --random 20

    Each cell is an ordinary run in the folder of the sweep. Runs that differ only in the seed are repeats: table and
    plots show their mean and standard deviation. The same command again continues a sweep that was stopped, and with
    more values it adds cells. Exit code 1: a cell failed. With --on slurm also every flag of `paceline submit slurm`,
    except --array and --start.
    """

    values: Annotated[tuple[str, ...], Arg("SETTING=VALUES", place="word")] = ()
    """Settings to vary: A,B,C are values, 1..3 are the whole numbers 1, 2 and 3. With --random, LOW..HIGH is an
    interval."""
    random: Annotated[int, Range(low=0, high=2000)] = 0
    """Draw N random combinations instead of the whole grid; 0: the grid. Values from an interval with a positive
    lower end are drawn on a logarithmic scale. Seeds are combined with each of them."""
    metric: Literal["val_accuracy", "val_loss", "test_accuracy", "test_loss"] = "val_accuracy"
    """What decides which is best: the best epoch of the validation, or the test."""
    on: Literal["local", "slurm"] = "local"
    """local: one cell after the other, on this machine. slurm: an array of jobs."""
    retry: bool = False
    """Run failed cells again."""
    dry_run: bool = False
    """Show the cells; start nothing."""
    output_dir: Path | None = None
    """The folder of the sweep (sweeps/RECIPE unless given)."""
    job: Annotated[tuple[Setting, ...], FlagsOf(SlurmFlags)] = ()


def sweep(settings: Sweep) -> int:
    from paceline.tools.study.board import run_cells
    from paceline.tools.study.cells import open_cells, read_states
    from paceline.tools.study.queue import check_jobs, job_settings

    given = job_settings(settings.on, settings.job, decided=_SET_BY_SWEEP)
    job = parse_job(given) if settings.on == "slurm" else None
    loaded, spec = _plan(settings, job)
    folder = (settings.output_dir or Path("sweeps") / spec.name).absolute()
    spec = continue_sweep(folder, spec)
    _check_cells(spec)
    shapes = _shapes(settings, job, loaded, folder) if job is not None else {}
    states = read_states(folder, spec)
    if settings.dry_run:
        _show(spec, states, folder, shapes, retries=settings.retry)
        return EXIT_FINISHED
    if shapes:
        check_jobs(given, loaded, shapes, open_cells(states, retries=settings.retry))
    write_sweep(folder, spec)
    run_cells(folder, spec, states, shapes, retries=settings.retry)
    return _finish(settings, folder, spec, states)


def _plan(settings: Sweep, job: JobSpec | None) -> tuple[LoadedConfig, SweepSpec]:
    from paceline.launch.request import decide_processes, read_request

    if "=" in settings.recipe:
        hint = f"paceline sweep RECIPE {settings.recipe}"
        raise UserError("the recipe is missing", where="the command line", got=settings.recipe, hint=hint)
    _refuse_lists(settings)
    axes = parse_axes(settings.values, is_random=settings.random > 0)
    for setting in settings.flags:
        name = setting.field.name
        if name in TAKEN:
            raise UserError("the sweep decides this for each cell", where=setting.where, hint="leave it out")
        if name in [axis.name for axis in axes]:
            raise UserError(f"{name} is both varied and given as a flag", where=setting.where, hint="leave one out")
    if job is not None and "processes" in [axis.name for axis in axes]:
        raise UserError("on a cluster the job decides the number of ranks", where="processes", hint="leave it out")
    points = make_points(axes, settings.random)
    # With the values of the first cell: the recipe alone may not be allowed.
    loaded = read_request(settings.recipe, [*settings.flags, *flags_of(points[0])])
    recipe, flags = recipe_argument(loaded), tuple(token for setting in settings.flags for token in setting.tokens())
    return loaded, SweepSpec(
        recipe=recipe,
        name=loaded.recipe_name,
        flags=flags,
        points=points,
        world_size=job.world_size if job is not None else decide_processes(loaded),
        global_batch_size=loaded.config.train.global_batch_size,
        place=settings.on,
        settings=shared_settings(recipe, flags, [*TAKEN, *(axis.name for axis in axes)]),
    )


def _refuse_lists(settings: Sweep) -> None:
    """`--base-lr 0.1,0.4` is a flag of every cell, with one value. A list is meant as values to vary."""
    for setting in settings.flags:
        field, text = setting.field, setting.values[0] if len(setting.values) == 1 else ""
        if "," in text and field.type in (int, float) and not field.is_tuple:
            raise UserError(
                f"{field.flag} has one value in every cell",
                where=setting.where,
                got=text,
                hint=f"to vary it, write it without dashes: paceline sweep {settings.recipe} {field.name}={text}",
            )


def _check_cells(spec: SweepSpec) -> None:
    """Every check that `train` would make of any cell, before the first one starts."""
    from paceline.launch.request import decide_processes, read_request
    from paceline.settings.rules import check_world

    without_seeds = {cell.without_seed: cell.settings for cell in spec.cells()}
    seeds = {dict(cell.settings).get(SEED): cell.settings for cell in spec.cells()}
    for point in dict.fromkeys([*without_seeds.values(), *seeds.values()]):
        loaded = read_request(spec.recipe, [*spec.flags, *flags_of(point)])
        check_world(loaded, decide_processes(loaded) if spec.place == "local" else spec.world_size)


def _shapes(settings: Sweep, job: JobSpec, loaded: LoadedConfig, folder: Path) -> dict[int, JobSpec]:
    from paceline.integrations.slurm.client import require_sbatch
    from paceline.integrations.slurm.prepare import complete

    if not settings.dry_run:
        require_sbatch()
    return {job.world_size: complete(replace(job, folder=folder / "jobs"), loaded, settings.flags)}


def _show(spec: SweepSpec, states: list[CellState], folder: Path, shapes: dict[int, JobSpec], *, retries: bool) -> None:
    from paceline.tools.study.cells import describe, open_cells
    from paceline.tools.study.queue import write_scripts

    todo = open_cells(states, retries=retries)
    print(f"{spec.headline}, {len(todo)} to run")
    print(f"folder    {os.path.relpath(folder)}")
    for found in states:
        print(f"  {describe(found)}")
    if not shapes:
        for found in todo[:1]:
            print("command   paceline " + shlex.join(spec.command(found.cell, folder)))
        return
    for path, _, script, lines in write_scripts(folder, spec, shapes, todo):
        print(f"\n--- {path}\n{script}--- {path.with_suffix('.commands')}\n{lines}", end="")


def _finish(settings: Sweep, folder: Path, spec: SweepSpec, states: list[CellState]) -> int:
    from paceline.tools.study.board import print_end
    from paceline.tools.study.sweep_report import write_sweep_report

    measured = [found.measured for found in states if found.measured is not None]
    return print_end(states, lambda failed: write_sweep_report(folder, spec, measured, settings.metric, failed))


COMMANDS = (Command("sweep", Sweep, sweep, helps_without_arguments=True),)
