"""`paceline bench [RECIPE]`: collectives, data pipeline and training step, each alone and against its limit."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paceline.cli.command import Command, RecipeSettings
from paceline.errors import EXIT_FINISHED, PacelineError, UserError
from paceline.launch.request import check_joined_world, decide_processes, read_request
from paceline.runs.folder import write_json
from paceline.runtime.detect import (
    RankEnvironment,
    check_whole_job,
    count_gpu_ranks,
    read_nodes,
    read_rank_environment,
    threads_per_rank,
)
from paceline.settings.command_line import arguments_of
from paceline.settings.declare import Arg, Range
from paceline.settings.load import LoadedConfig
from paceline.settings.rules import check_world
from paceline.settings.syntax import parse_processes
from paceline.tools.bench.request import DEFAULT_SIZES, PARTS, BenchRequest, Part, parse_sizes

if TYPE_CHECKING:
    from paceline.tools.bench.session import BenchReport


@dataclass(frozen=True)
class Bench(RecipeSettings):
    """Measure collectives, data and training step of a recipe, and compare each with the limit of this machine.

    Flags of `train` about folders, checkpoints and failures change nothing.
    """

    what: Annotated[tuple[Part, ...], Arg("PART,PART", many="commas")] = ()
    """The parts to measure (all unless given)."""
    sizes: Annotated[str, Arg("MIN:MAX")] = DEFAULT_SIZES
    """Sizes of messages."""
    seconds_per_size: Annotated[float, Range(low=0.01, high=60)] = 0.3
    """Duration of each collective; data gets 6 and the step 20 times as long."""
    profile: Annotated[str | None, Arg("FOLDER", bare="")] = None
    """Write a trace of ten steps per rank (to bench-trace-<time> unless named)."""
    json: bool = False
    """Print JSON."""
    output: Annotated[str | None, Arg("FILE", bare="")] = None
    """Write the JSON to a file (bench-<time>.json unless named)."""


def bench(settings: Bench) -> int:
    from paceline.cli.main import rank_main

    # Read when torch is loaded: its profiler would print a line otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    environment = read_rank_environment()
    request, loaded, processes = _read(settings)
    check_whole_job(environment)
    if environment is not None:
        if environment.launcher != "paceline":
            _check_joined(request, loaded, environment)
        return _be_a_rank(request, environment, settings)
    nodes = read_nodes()
    _check_world(request, loaded, processes, processes * nodes.count, is_asked=bool(settings.what))
    from paceline.launch.single_attempt import run_single_attempt

    threads = threads_per_rank(request.config.parallel, processes)
    # The folder for traces is named here. Each rank would name it by its own clock.
    again = replace(settings, profile=None if request.profile is None else str(request.profile))
    arguments = ["bench", *settings.as_arguments(), *arguments_of(again)]
    outcome = run_single_attempt(rank_main, arguments, processes=processes, threads=threads, nodes=nodes)
    outcome.print_error(with_traceback="--debug" in sys.argv)
    return outcome.exit_code


def _read(settings: Bench) -> tuple[BenchRequest, LoadedConfig, int]:
    """The checked request, and the number of ranks per node."""
    parts = tuple(part for part in PARTS if part in settings.what or not settings.what)
    sizes = parse_sizes(settings.sizes)
    profile = None if settings.profile is None else Path(settings.profile or f"bench-trace-{_now()}")
    _check_places(profile, settings.output)
    if parts == ("collectives",) and profile is None:
        loaded, processes = _read_without_batch(settings)
    else:
        loaded = read_request(settings.recipe, settings.flags)
        processes = decide_processes(loaded)
    request = BenchRequest(loaded.recipe_name, loaded.config, parts, sizes, settings.seconds_per_size, profile)
    return request, loaded, processes


def _check_places(profile: Path | None, output: str | None) -> None:
    """Check where results go before minutes are spent on them."""
    if profile is not None and profile.exists() and not profile.is_dir():
        raise UserError("the folder for traces is a file", where="flag --profile", got=str(profile))
    if output and not Path(output).parent.is_dir():
        raise UserError("there is no such folder", where="flag --output", got=str(Path(output).parent))
    if output and Path(output).is_dir():
        raise UserError("the file for the results is a folder", where="flag --output", got=output)


def _read_without_batch(settings: Bench) -> tuple[LoadedConfig, int]:
    """Collectives have no batch, so any number of ranks is allowed."""
    asked = next((setting.values[-1] for setting in settings.flags if setting.field.name == "processes"), "0")
    processes = parse_processes(asked).high
    loaded = read_request(settings.recipe, [s for s in settings.flags if s.field.name != "processes"])
    config = replace(loaded.config, parallel=replace(loaded.config.parallel, processes=asked))
    return replace(loaded, config=config), processes or decide_processes(loaded)


def _check_world(request: BenchRequest, loaded: LoadedConfig, local: int, world_size: int, *, is_asked: bool) -> None:
    if request.needs_recipe:
        check_world(loaded, world_size)
    if world_size == 1 and request.parts == ("collectives",) and is_asked:
        raise UserError(
            "collectives need two ranks or more", got="1 rank", hint="--processes 2, on one GPU with --device cpu"
        )
    room = count_gpu_ranks(request.config.parallel)
    if 0 < room < local:
        raise UserError(
            "more ranks than GPUs on this machine",
            got=f"{local} ranks, room for {room}",
            hint=f"--processes {room}, or --device cpu, or --ranks-per-gpu {local}",
        )


def _check_joined(request: BenchRequest, loaded: LoadedConfig, environment: RankEnvironment) -> None:
    if request.needs_recipe:
        check_joined_world(loaded, environment)


def _be_a_rank(request: BenchRequest, environment: RankEnvironment, settings: Bench) -> int:
    from rich.console import Console

    from paceline.tools.bench.screen import lines_of
    from paceline.tools.bench.session import run_rank

    is_first = environment.rank == 0
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=not is_first or settings.json)

    def tell(part: str, report: BenchReport) -> None:
        for line in lines_of(part, report):
            is_heading = line.split(" ")[0].isupper()
            console.print(line, style="bold" if is_heading or part == "verdict" else None, markup=False)

    report = run_rank(request, environment, tell)
    if is_first:
        _deliver(report, settings)
    verdict = report.verdict
    if verdict is not None and verdict.kind == "wrong-sums":
        raise PacelineError(verdict.text, hint="nothing trained here can be trusted: look at the links and drivers")
    return EXIT_FINISHED


def _deliver(report: BenchReport, settings: Bench) -> None:
    if settings.output is not None:
        path = Path(settings.output or f"bench-{_now()}.json")
        write_json(path, report.to_json())
        if not settings.json:
            print(f"results in {path}")
    if settings.json:
        print(json.dumps(report.to_json(), indent=2))


def _now() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")


COMMANDS = (Command("bench", Bench, bench),)
