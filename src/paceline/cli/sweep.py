"""`paceline sweep`: train a recipe with several values of some settings, and compare the results."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from paceline.cli.command import Command, RecipeSettings
from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED, UserError
from paceline.launch.job import JobSpec, SlurmFlags, parse_job
from paceline.settings.declare import Arg, FlagsOf, Range
from paceline.settings.values import Setting
from paceline.tools.study.plan import recipe_argument
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
    from paceline.tools.study.cells import open_cells, read_states

    given = _job_settings(settings)
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
        _check_jobs(given, loaded, shapes, len(open_cells(states, retries=settings.retry)))
    write_sweep(folder, spec)
    _run(folder, spec, states, shapes, retries=settings.retry)
    return _finish(settings, folder, spec, states)


def _job_settings(settings: Sweep) -> dict[str, Setting]:
    """The flags of the jobs over the site profile; none for a sweep on this machine."""
    from paceline.integrations.slurm.prepare import with_site

    for setting in settings.job:
        if settings.on != "slurm":
            raise UserError(f"{setting.field.flag} needs --on slurm", where=setting.where, hint="--on slurm")
        if setting.field.name in _SET_BY_SWEEP:
            raise UserError("the sweep decides this", where=setting.where, hint="leave it out")
    if settings.on != "slurm":
        return {}
    return {name: setting for name, setting in with_site(settings.job).items() if name not in _SET_BY_SWEEP}


def _plan(settings: Sweep, job: JobSpec | None) -> tuple[LoadedConfig, SweepSpec]:
    from paceline.launch.request import decide_processes, read_request

    if "=" in settings.recipe:
        hint = f"paceline sweep RECIPE {settings.recipe}"
        raise UserError("the recipe is missing", where="the command line", got=settings.recipe, hint=hint)
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
    return loaded, SweepSpec(
        recipe=recipe_argument(loaded),
        name=loaded.recipe_name,
        flags=tuple(token for setting in settings.flags for token in setting.tokens()),
        points=points,
        world_size=job.world_size if job is not None else decide_processes(loaded),
        global_batch_size=loaded.config.train.global_batch_size,
        place=settings.on,
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


def _check_jobs(given: Mapping[str, Setting], loaded: LoadedConfig, shapes: dict[int, JobSpec], num_cells: int) -> None:
    """Before the first job is submitted: missing inputs, and jobs that this cluster can never start."""
    from paceline.integrations.slurm.prepare import check_cluster
    from paceline.launch.inputs import require_inputs

    if num_cells:
        jobs = [replace(job, array=f"0-{num_cells - 1}", resume="") for job in shapes.values()]
        require_inputs(loaded, brings_own_weights=bool(jobs[0].container_image or jobs[0].environment))
        check_cluster(jobs, given)


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


def _run(folder: Path, spec: SweepSpec, states: list[CellState], shapes: dict[int, JobSpec], *, retries: bool) -> None:
    from paceline.tools.study.board import Board
    from paceline.tools.study.cells import run_local
    from paceline.tools.study.queue import run_queue

    try:
        with Board(spec, states, folder) as board:
            if shapes:
                run_queue(folder, spec, shapes, states, retries=retries, on_change=board.update, say=board.say)
            else:
                run_local(folder, spec, states, retries=retries, on_change=board.update)
    except KeyboardInterrupt:
        words = "the jobs stay in the queue; " if shapes else ""
        print(f"\nstopped; {words}the same command continues", file=sys.stderr)
        raise


def _finish(settings: Sweep, folder: Path, spec: SweepSpec, states: list[CellState]) -> int:
    from paceline.tools.study.sweep_report import write_sweep_report

    failed = [(found.cell.name, found.reason) for found in states if found.state == "failed"]
    for name, reason in failed:
        print(f"failed    {name}: {reason}")
    measured = [found.measured for found in states if found.measured is not None]
    if not measured:
        print("no cell has finished, so there is nothing to report")
        return EXIT_DIFFERENT
    for line in write_sweep_report(folder, spec, measured, settings.metric, failed):
        print(line)
    if failed:
        print("next      the same command with --retry")
    return EXIT_DIFFERENT if failed else EXIT_FINISHED


COMMANDS = (Command("sweep", Sweep, sweep, helps_without_arguments=True),)
