"""`paceline study`: measure how a recipe scales, explain it, and predict other sizes."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from paceline.cli.command import Command, RecipeSettings
from paceline.errors import EXIT_FINISHED, UserError
from paceline.launch.job import JobSpec, SlurmFlags, parse_job, parse_time_s
from paceline.settings.declare import Arg, FlagsOf
from paceline.settings.values import Setting
from paceline.tools.study.grid import Asked, StudySpec, check_cells, plan_study, refuse_taken

if TYPE_CHECKING:  # imported late: --help must be fast
    from paceline.settings.load import LoadedConfig
    from paceline.tools.study.cells import CellState

_SHARING = ("--exclusive", "--oversubscribe", "--share", "-s")  # options of sbatch that decide it
# Flags of a job that the study decides.
_SET_BY_STUDY = ("nodes", "array", "start", "max_requeues", "signal_notice_s")


@dataclass(frozen=True)
class Study(Asked, RecipeSettings):
    """Train a recipe on every world size with every strategy, several times, and say how it scales and why.

    Each cell is an ordinary run in the folder of the study. The same command again continues a study that was stopped.
    Exit code 1: a cell failed. With --on slurm also every flag of `paceline submit slurm`, except --nodes, --array and
    --start; ranks per node by --gpus-per-node or --processes-per-node.
    """

    on: Literal["local", "slurm"] = "local"
    """local: one cell after the other, on this machine. slurm: an array per world size."""
    retry: bool = False
    """Run failed cells again."""
    dry_run: bool = False
    """Show the grid, its cost and the scripts; start nothing."""
    output_dir: Path | None = None
    """The folder of the study (studies/RECIPE unless given)."""
    job: Annotated[tuple[Setting, ...], FlagsOf(SlurmFlags)] = ()


@dataclass(frozen=True)
class Report:
    """Write results.csv, plots and page of a study again, from its runs."""

    study: Annotated[Path, Arg(place="word")]
    """The folder of the study."""


@dataclass(frozen=True)
class Collect:
    """Make a study of runs that were started by hand."""

    run: Annotated[tuple[str, ...], Arg(place="word", completes="run")]
    """Run folders, or their names in runs/."""
    output_dir: Path | None = None
    """The folder of the study."""


def study(settings: Study) -> int:
    from paceline.tools.study.board import run_cells
    from paceline.tools.study.cells import open_cells, read_states
    from paceline.tools.study.grid import continue_study, write_spec
    from paceline.tools.study.queue import check_jobs, job_settings

    given = job_settings(settings.on, settings.job, decided=_SET_BY_STUDY)
    job = parse_job(given) if settings.on == "slurm" else None
    loaded, spec = _plan(settings, job)
    folder = (settings.output_dir or Path("studies") / spec.name).absolute()
    spec = continue_study(folder, spec)
    check_cells(spec)
    shapes = _shapes(settings, job, loaded, spec, folder) if job is not None else {}
    spec = _state_isolation(spec, shapes)
    states = read_states(folder, spec)
    if settings.dry_run:
        _show_grid(spec, states, folder, shapes, retries=settings.retry)
        return EXIT_FINISHED
    if shapes:
        check_jobs(given, loaded, shapes, open_cells(states, retries=settings.retry), size_flag="flag --world-sizes")
    write_spec(folder, spec)
    run_cells(folder, spec, states, shapes, retries=settings.retry)
    return _finish(folder, spec, states)


def _plan(settings: Study, job: JobSpec | None) -> tuple[LoadedConfig, StudySpec]:
    from paceline.launch.request import read_request

    refuse_taken(settings.flags)
    loaded = read_request(settings.recipe, settings.flags)
    threads = 0
    if job is not None and not job.gpus:
        # The same threads per rank in every cell: the share of a rank on the fullest node.
        threads = max(1, job.cpus_per_task // job.ranks_per_node * job.tasks_per_node)
    return loaded, plan_study(loaded, settings, settings.flags, place=settings.on, threads=threads)


def _shapes(settings: Study, job: JobSpec, loaded: LoadedConfig, spec: StudySpec, folder: Path) -> dict[int, JobSpec]:
    """The job of each world size, on as few nodes as possible."""
    from paceline.integrations.slurm.client import require_sbatch
    from paceline.integrations.slurm.prepare import complete

    if not settings.dry_run:
        require_sbatch()
    most = job.ranks_per_node
    shapes = {}
    for size in spec.world_sizes:
        if size > most and size % most:
            raise UserError(
                f"{size} ranks do not fill whole nodes",
                where="flag --world-sizes",
                got=f"{most} ranks per node",
                allowed=f"up to {most}, or multiples of it",
            )
        ranks = min(size, most)
        kind, _, _ = job.gpus.rpartition(":")
        gpus = (f"{kind}:{ranks}" if kind else str(ranks)) if job.gpus else ""
        shape = replace(job, nodes=size // ranks, ranks_per_node=ranks, gpus=gpus, folder=folder / "jobs")
        if not any(line.startswith(_SHARING) for line in job.sbatch):
            shape = replace(shape, sbatch=(*job.sbatch, "--exclusive"))
        shapes[size] = complete(shape, loaded, settings.flags)
    return shapes


def _state_isolation(spec: StudySpec, shapes: dict[int, JobSpec]) -> StudySpec:
    """Jobs that share a node slow each other down, so their times do not compare."""
    if not shapes:
        return spec
    lines = next(iter(shapes.values())).sbatch
    is_alone = "--exclusive" in lines  # --exclusive=user shares nodes among the cells
    words = (
        "no cell shares its nodes with another job (--exclusive)"
        if is_alone
        else "cells may share nodes with other jobs, which changes their times"
    )
    return spec if words in spec.stated else replace(spec, stated=(*spec.stated, words))


def _show_grid(
    spec: StudySpec, states: list[CellState], folder: Path, shapes: dict[int, JobSpec], *, retries: bool
) -> None:
    from paceline.tools.study.cells import describe, estimate_left_s, open_cells

    todo = open_cells(states, retries=retries)
    print(f"study     {spec.name} in {os.path.relpath(folder)}: {len(states)} cells, {len(todo)} to run")
    for words in spec.stated:
        print(f"the same  {words}")
    for found in states:
        print(f"  {describe(found)}")
    left_s = estimate_left_s(states)
    if not shapes:
        left = "" if left_s is None else f", about {left_s / 60:.0f} min by the cells that are done"
        print(f"cost      {len(todo)} runs, one after the other, on this machine{left}")
        for found in todo[:1]:
            print("command   paceline " + shlex.join(spec.command(found.cell, folder)))
        return
    from paceline.tools.study.queue import write_scripts

    limit = {size: parse_time_s(job.time) / 3600 if job.time else None for size, job in shapes.items()}
    hours = [(limit[found.cell.world_size], shapes[found.cell.world_size].nodes) for found in todo]
    if all(limit_h is not None for limit_h, _ in hours):
        total = sum((limit_h or 0.0) * nodes for limit_h, nodes in hours)
        print(f"cost      at most {total:.2f} node-hours: every cell up to its time limit")
    else:
        print("cost      not known: give --time, the limit of one cell")
    for path, _, script, lines in write_scripts(folder, spec, shapes, todo):
        print(f"\n--- {path}\n{script}--- {path.with_suffix('.commands')}\n{lines}", end="")


def _finish(folder: Path, spec: StudySpec, states: list[CellState]) -> int:
    from paceline.tools.study.board import print_end
    from paceline.tools.study.report import write_report

    return print_end(states, lambda failed: write_report(folder, spec, failed))


def collect_runs(settings: Collect) -> int:
    from paceline.tools.study.by_hand import collect

    table, lines, code = collect(list(settings.run), settings.output_dir)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for line in lines:
        print(line)
    return code


def report(settings: Report) -> int:
    from paceline.tools.study.cells import read_states
    from paceline.tools.study.grid import read_spec

    folder = settings.study.absolute()
    spec = read_spec(folder)
    return _finish(folder, spec, read_states(folder, spec))


COMMANDS = (
    Command("study", Study, study, helps_without_arguments=True),
    Command("study report", Report, report),
    Command("study collect", Collect, collect_runs),
)
