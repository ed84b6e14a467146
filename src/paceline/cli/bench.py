"""`paceline bench [RECIPE]`: collectives, data pipeline and training step, each alone and against its limit."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.help import wants_help
from paceline.cli.train import rank_main
from paceline.errors import EXIT_FINISHED, PacelineError, UserError
from paceline.launch.request import check_joined_world, decide_processes, read_request
from paceline.runs.folder import write_json
from paceline.runtime.detect import (
    RankEnvironment,
    check_whole_job,
    count_gpus,
    read_nodes,
    read_rank_environment,
    threads_per_rank,
)
from paceline.settings.load import LoadedConfig
from paceline.settings.processes import parse_processes
from paceline.settings.rules import check_world
from paceline.tools.bench.request import DEFAULT_SIZES, PARTS, BenchRequest, parse_parts, parse_seconds, parse_sizes

if TYPE_CHECKING:
    from paceline.tools.bench.session import Report

_HELP = """Measure what a recipe's speed is made of on this machine, and hold it against what the machine can do.
Takes the flags of `paceline train` (those about folders, checkpoints and failures change nothing), and:
--what collectives,data,step (the parts to measure; all unless given), --sizes 4KB:64MB (of messages),
--seconds-per-size 0.3 (of each collective; data gets 6 and the step 20 times as long),
--profile[=FOLDER] (a trace of ten steps per rank), --json (for programs),
--output[=FILE] (keep the JSON, as bench-<time>.json unless named)."""
_VALUES = {"--what": ",".join(PARTS), "--sizes": DEFAULT_SIZES, "--seconds-per-size": "0.3"}
_SWITCHES = ("--profile", "--output", "--json")  # the first two may also have a value, after =
_PROCESSES = ("--processes", "--world-size")


def run(arguments: list[str]) -> int:
    if wants_help(arguments, "bench", _HELP):
        return EXIT_FINISHED
    # Read when torch is loaded: its profiler would announce itself to every user.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    environment = read_rank_environment()
    own, rest = _split_own_flags(arguments)
    request, loaded, processes = _read(own, rest)
    check_whole_job(environment)
    if environment is not None:
        if environment.launcher != "paceline":
            _check_joined(request, loaded, environment)
        return _be_a_rank(request, environment, own)
    nodes = read_nodes()
    _check_world(request, loaded, processes, processes * nodes.count, is_asked="--what" in own)
    from paceline.launch.single_attempt import run_single_attempt

    threads = threads_per_rank(request.config.parallel, processes)
    # Folders and files are named here, once: the clocks of several ranks would name several.
    names = {**own, **({"--profile": str(request.profile)} if request.profile else {})}
    again = [f"{name}={value}" if value else name for name, value in names.items()]
    given = ["bench", *rest, *again]
    outcome = run_single_attempt(rank_main, given, processes=processes, threads=threads, nodes=nodes)
    outcome.print_error(with_traceback="--debug" in sys.argv)
    return outcome.exit_code


def _split_own_flags(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """This verb's own flags that were given, and what is left for `paceline train`'s reader."""
    own: dict[str, str] = {}
    rest: list[str] = []
    given = list(arguments)
    while given:
        token = given.pop(0)
        name, has_value, value = token.partition("=")
        if name not in _VALUES and name not in _SWITCHES:
            rest.append(token)
        elif name == "--json" and has_value:
            raise UserError("--json takes no value", got=token, hint="--json --output=FILE keeps it in a file")
        elif name in _VALUES and not has_value:
            if not given or given[0].startswith("--"):
                raise UserError(f"{name} needs a value", where="the command line", hint=f"{name} {_VALUES[name]}")
            own[name] = given.pop(0)
        elif has_value and not value:
            raise UserError(f"{name} needs a value after =", where="the command line", got=token)
        else:
            own[name] = value
    return own, rest


def _read(own: dict[str, str], rest: list[str]) -> tuple[BenchRequest, LoadedConfig, int]:
    """Everything the user said, checked; and the number of ranks per node."""
    parts = parse_parts(own.get("--what", _VALUES["--what"]))
    sizes = parse_sizes(own.get("--sizes", _VALUES["--sizes"]))
    seconds = parse_seconds(own.get("--seconds-per-size", _VALUES["--seconds-per-size"]))
    profile = Path(own["--profile"] or f"bench-trace-{_now()}") if "--profile" in own else None
    _check_places(profile, own.get("--output"))
    if parts == ("collectives",) and profile is None:
        loaded, processes = _read_without_batch(rest)
    else:
        loaded = read_request(rest)
        processes = decide_processes(loaded)
    request = BenchRequest(loaded.recipe_name, loaded.config, parts, sizes, seconds, profile)
    return request, loaded, processes


def _check_places(profile: Path | None, output: str | None) -> None:
    """Before minutes are spent on what cannot be kept."""
    if profile is not None and profile.exists() and not profile.is_dir():
        raise UserError("the folder for traces is a file", where="flag --profile", got=str(profile))
    if output and not Path(output).parent.is_dir():
        raise UserError("there is no such folder", where="flag --output", got=str(Path(output).parent))
    if output and Path(output).is_dir():
        raise UserError("the file for the results is a folder", where="flag --output", got=output)


def _read_without_batch(rest: list[str]) -> tuple[LoadedConfig, int]:
    """Collectives know no batch: any number of ranks will do, whatever the recipe's batch can be divided by."""
    words, asked, given = [], "0", list(rest)
    while given:
        token = given.pop(0)
        name, has_value, value = token.partition("=")
        if name not in _PROCESSES or not (has_value or given):
            words.append(token)
        else:
            asked = value if has_value else given.pop(0)
    processes = parse_processes(asked).high
    loaded = read_request(words)
    config = replace(loaded.config, parallel=replace(loaded.config.parallel, processes=asked))
    return replace(loaded, config=config), processes or decide_processes(loaded)


def _check_world(request: BenchRequest, loaded: LoadedConfig, local: int, world_size: int, *, is_asked: bool) -> None:
    if request.needs_recipe:
        check_world(loaded, world_size)
    if world_size == 1 and request.parts == ("collectives",) and is_asked:
        raise UserError(
            "collectives need two ranks or more", got="1 rank", hint="--processes 2, on one GPU with --device cpu"
        )
    gpus = count_gpus(request.config.parallel)
    if 0 < gpus < local:
        raise UserError(
            "more ranks than GPUs on this machine",
            got=f"{local} ranks, {gpus} GPUs",
            hint=f"--processes {gpus}, or --device cpu",
        )


def _check_joined(request: BenchRequest, loaded: LoadedConfig, environment: RankEnvironment) -> None:
    if request.needs_recipe:
        check_joined_world(loaded, environment)


def _be_a_rank(request: BenchRequest, environment: RankEnvironment, own: dict[str, str]) -> int:
    from rich.console import Console

    from paceline.tools.bench.screen import lines_of
    from paceline.tools.bench.session import run_rank

    is_speaking = environment.rank == 0
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=not is_speaking or "--json" in own)

    def tell(part: str, report: Report) -> None:
        for line in lines_of(part, report):
            is_heading = line.split(" ")[0].isupper()
            console.print(line, style="bold" if is_heading or part == "verdict" else None, markup=False)

    report = run_rank(request, environment, tell)
    if is_speaking:
        _deliver(report, own)
    verdict = report.verdict
    if verdict is not None and verdict.kind == "wrong-sums":
        raise PacelineError(verdict.text, hint="nothing trained here can be trusted: look at the links and drivers")
    return EXIT_FINISHED


def _deliver(report: Report, own: dict[str, str]) -> None:
    if "--output" in own:
        path = Path(own["--output"] or f"bench-{_now()}.json")
        write_json(path, report.to_json())
        if "--json" not in own:
            print(f"results in {path}")
    if "--json" in own:
        print(json.dumps(report.to_json(), indent=2))


def _now() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")
