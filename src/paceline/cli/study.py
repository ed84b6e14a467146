"""`paceline study RECIPE [flags]`: how does it scale, why, and what would other sizes do."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED, UserError
from paceline.settings.sites import Given, JobSetting, JobSettings, job_settings

if TYPE_CHECKING:  # these import more than --help may
    from paceline.launch.job import JobSpec
    from paceline.settings.load import LoadedConfig
    from paceline.tools.study.cells import CellState
    from paceline.tools.study.grid import StudySpec

_USAGE = """\
usage: paceline study RECIPE [--world-sizes 1,2,4] [--strategies ddp,fsdp] [--repeats 3] [flags of train]
       paceline study report STUDY                  results.csv, plots and page again, from what is there
       paceline study collect RUN... [--output-dir PATH]        the same from runs that were started by hand
       paceline study predict STUDY --world-sizes 16,64,256 [--link 100Gbit/s,2us] [--epochs 90] [--price 2.5] [--json]

Train a recipe on every world size with every strategy, several times, and say how it scales and why. Each cell is an
ordinary run in the study's folder. The same command again goes on where an earlier one stopped. Exit code 1: a cell
failed.

  --world-sizes 1,2,4      numbers of ranks (default: 1, 2, 4, ... as far as this machine goes)
  --strategies ddp,fsdp    (default: ddp)
  --repeats N              runs of each cell, for intervals (default: 3)
  --scaling KIND           strong: the same global batch for all; weak: the recipe's for one rank, times the ranks; both
  --on PLACE               local: one cell after the other, here; slurm: an array per world size
  --retry                  run failed cells again
  --dry-run                show the grid, what it will cost, and the scripts; start nothing
  --output-dir PATH        the study's folder (default: studies/RECIPE)

With --on slurm also every flag of `paceline submit slurm` but --nodes, --array and --start; ranks per node by
--gpus-per-node or --processes-per-node.
"""
_OWN = {
    "world_sizes": JobSetting("world_sizes", "N,N", "numbers of ranks, as 1,2,4"),
    "strategies": JobSetting("strategies", "LIST", "ddp, fsdp or both"),
    "repeats": JobSetting("repeats", "N", "runs of each cell"),
    "scaling": JobSetting("scaling", "KIND", "strong, weak or both"),
    "on": JobSetting("on", "PLACE", "local or slurm"),
    "retry": JobSetting("retry", "", "run failed cells again", "switch"),
    "dry_run": JobSetting("dry_run", "", "show, and start nothing", "switch"),
    "output_dir": JobSetting("output_dir", "PATH", "the study's folder"),
}
_SHARING = ("--exclusive", "--oversubscribe", "--share", "-s")  # lines of sbatch that decide it
_NOT_OURS = ("nodes", "array", "start", "dry_run", "max_requeues", "signal_notice")


def run(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return EXIT_FINISHED
    if arguments[0] == "predict":
        from paceline.cli.study_predict import predict

        return predict(arguments[1:])
    if arguments[0] == "report":
        return _report_only(arguments[1:])
    if arguments[0] == "collect":
        return _collect(arguments[1:])
    return _study(arguments)


def _study(arguments: list[str]) -> int:
    from paceline.cli.submit_common import split_flags
    from paceline.tools.study.cells import open_cells, read_states
    from paceline.tools.study.grid import continue_study, write_spec

    is_slurm = _place(arguments) == "slurm"
    cluster = {name: s for name, s in job_settings().items() if name not in _NOT_OURS} if is_slurm else {}
    typed, train = split_flags(arguments, {**cluster, **_OWN})
    loaded, spec = _plan(typed, train, "slurm" if is_slurm else "local")
    folder = Path(_value(typed, "output_dir") or Path("studies") / spec.name).absolute()
    spec = continue_study(folder, spec)
    _check_cells(train, spec)
    shapes = _shapes(typed, loaded, train, spec, folder) if is_slurm else {}
    spec = _state_isolation(spec, shapes)
    states = read_states(folder, spec)
    retries = "retry" in typed
    if "dry_run" in typed:
        _show_grid(spec, states, folder, shapes, retries=retries)
        return EXIT_FINISHED
    if shapes:
        _check_jobs(typed, loaded, shapes, open_cells(states, retries=retries))
    write_spec(folder, spec)
    _run(folder, spec, states, shapes, retries=retries)
    return _finish(folder, spec, states)


def _place(arguments: list[str]) -> str:
    """Read first: it decides which other flags there are."""
    for number, word in enumerate(arguments):
        if word == "--on" or word.startswith("--on="):
            value = word.partition("=")[2] or (arguments[number + 1] if number + 1 < len(arguments) else "")
            if value not in ("local", "slurm"):
                raise UserError(f"--on {value!r} is not valid", where="flag --on", allowed="local, slurm")
            return value
    return "local"


def _value(typed: JobSettings, name: str, default: str = "") -> str:
    return typed[name].values[-1] if name in typed else default


def _plan(typed: JobSettings, train: list[str], place: str) -> tuple[LoadedConfig, StudySpec]:
    from paceline.launch.request import read_request
    from paceline.tools.study.plan import Asked, plan_study, refuse_taken

    asked = Asked(
        _value(typed, "world_sizes"),
        _value(typed, "strategies", Asked.strategies),
        _value(typed, "repeats", Asked.repeats),
        _value(typed, "scaling", Asked.scaling),
    )
    has_recipe = bool(train) and not train[0].startswith("-")
    flags = train[1:] if has_recipe else train
    refuse_taken(flags)
    loaded = read_request(train)
    threads = _threads_of_jobs(typed) if place == "slurm" else 0
    return loaded, plan_study(loaded, asked, flags, place=place, threads=threads)


def _threads_of_jobs(typed: JobSettings) -> int:
    """Of a rank, in every cell alike: what the widest node grants to each of its ranks. On GPUs it does not matter."""
    job = _parse(typed)
    if job.gpus:
        return 0
    return max(1, job.cpus_per_task // job.ranks_per_node * job.tasks_per_node)


def _parse(typed: JobSettings) -> JobSpec:
    from paceline.launch.job import parse_job

    return parse_job(_settings(typed))


def _settings(typed: JobSettings) -> JobSettings:
    from paceline.cli.submit_slurm import with_site

    return with_site({name: given for name, given in typed.items() if name not in _OWN})


def _check_jobs(typed: JobSettings, loaded: LoadedConfig, shapes: dict[int, JobSpec], cells: list[CellState]) -> None:
    """What is missing here, or what this cluster can never start, is said before the first job is submitted."""
    from collections import Counter
    from dataclasses import replace

    from paceline.cli.submit_slurm import check_cluster
    from paceline.launch.inputs import require_inputs

    sizes = Counter(found.cell.world_size for found in cells)
    jobs = [replace(shapes[size], array=f"0-{count - 1}", resume="") for size, count in sorted(sizes.items())]
    if jobs:
        require_inputs(loaded, brings_own_weights=bool(jobs[0].container_image or jobs[0].environment))
        where = {"nodes": Given((), "flag --world-sizes"), **_settings(typed)}
        check_cluster(jobs, where)


def _check_cells(train: list[str], spec: StudySpec) -> None:
    """What `train` would say of any cell, said before the first one starts."""
    from paceline.launch.request import read_request
    from paceline.settings.rules import check_world

    for cell in {(c.strategy, c.world_size, c.global_batch_size) for c in spec.cells()}:
        strategy, size, batch = cell
        flags = [*spec.flags, f"--strategy={strategy}", f"--global-batch-size={batch}"]
        check_world(read_request([spec.recipe, *flags]), size)


def _shapes(
    typed: JobSettings, loaded: LoadedConfig, train: list[str], spec: StudySpec, folder: Path
) -> dict[int, JobSpec]:
    """The job of each world size: as few nodes as it needs."""
    from dataclasses import replace

    from paceline.cli.submit_slurm import complete
    from paceline.integrations.slurm.client import require_sbatch

    job = _parse(typed)
    if "dry_run" not in typed:
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
        shapes[size] = complete(shape, loaded, train)
    return shapes


def _state_isolation(spec: StudySpec, shapes: dict[int, JobSpec]) -> StudySpec:
    """Jobs that share a node slow each other down, so their times do not compare."""
    from dataclasses import replace

    if not shapes:
        return spec
    lines = next(iter(shapes.values())).sbatch
    is_alone = "--exclusive" in lines  # --exclusive=user shares nodes among the cells
    words = (
        "every cell has its nodes for itself (--exclusive)"
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
    from paceline.launch.job import parse_time_s
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


def _run(folder: Path, spec: StudySpec, states: list[CellState], shapes: dict[int, JobSpec], *, retries: bool) -> None:
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
        print(f"\nstopped; {words}the same command goes on", file=sys.stderr)
        raise


def _finish(folder: Path, spec: StudySpec, states: list[CellState]) -> int:
    from paceline.tools.study.report import write_report

    failed = [found for found in states if found.state == "failed"]
    for found in failed:
        print(f"failed    {found.cell.name}: {found.reason}")
    if not any(found.state == "finished" for found in states):
        print("no cell has finished, so there is nothing to report")
        return EXIT_DIFFERENT
    for line in write_report(folder, spec, [(f.cell.name, f.reason) for f in failed]):
        print(line)
    if failed:
        print("next      the same command with --retry")
    return EXIT_DIFFERENT if failed else EXIT_FINISHED


def _collect(arguments: list[str]) -> int:
    from paceline.cli.submit_common import split_flags
    from paceline.tools.study.by_hand import collect

    typed, names = split_flags(arguments, {"output_dir": _OWN["output_dir"]})
    unknown = next((name for name in names if name.startswith("-")), None)
    if unknown is not None or not names:
        hint = "paceline study collect runs/a runs/b"
        raise UserError("paceline study collect needs runs", got=unknown or "none", hint=hint)
    folder = Path(_value(typed, "output_dir")) if "output_dir" in typed else None
    table, lines, code = collect(names, folder)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for line in lines:
        print(line)
    return code


def _report_only(arguments: list[str]) -> int:
    from paceline.tools.study.cells import read_states
    from paceline.tools.study.grid import read_spec

    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError("paceline study report needs one study", got=" ".join(arguments), hint="its folder")
    folder = Path(arguments[0]).absolute()
    spec = read_spec(folder)
    return _finish(folder, spec, read_states(folder, spec))
