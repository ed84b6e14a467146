"""`paceline find-lr RECIPE`: try learning rates, one step with each, and show where the loss falls."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

from paceline.cli.command import Command, RecipeSettings
from paceline.errors import EXIT_FINISHED, PacelineError, UserError
from paceline.launch.request import check_joined_world, decide_processes, read_request
from paceline.runtime.detect import (
    RankEnvironment,
    check_whole_job,
    read_nodes,
    read_rank_environment,
    threads_per_rank,
)
from paceline.settings.command_line import arguments_of
from paceline.settings.declare import Arg, Range
from paceline.settings.load import LoadedConfig
from paceline.settings.rules import check_world

_FLAG = "flag --rates"


@dataclass(frozen=True)
class FindLr(RecipeSettings):
    """Try learning rates on a recipe, one step with each, from small to large, until the loss diverges.

    Nothing is saved except a page with the plot. Flags of `train` about folders, checkpoints and failures change
    nothing.
    """

    rates: Annotated[str, Arg("LOW:HIGH")] = "1e-5:10"
    """Range of base_lr, in which the rates are spread evenly on a logarithmic scale."""
    steps: Annotated[int, Range(low=10, high=100_000)] = 100
    """Number of steps, each with another rate."""
    output: Annotated[str, Arg("FILE")] = ""
    """The page (find-lr-<time>.html unless named)."""


def find_lr(settings: FindLr) -> int:
    from paceline.cli.main import rank_main

    rates = _parse_rates(settings.rates)
    page = Path(settings.output or f"find-lr-{datetime.now().strftime('%Y%m%d-%H%M%S')}.html")
    _check_page(page)
    loaded = read_request(settings.recipe, settings.flags)
    environment = read_rank_environment()
    check_whole_job(environment)
    if environment is not None:
        if environment.launcher != "paceline":
            check_joined_world(loaded, environment)
        return _be_a_rank(loaded, environment, rates, settings.steps, page)
    processes, nodes = decide_processes(loaded), read_nodes()
    check_world(loaded, processes * nodes.count)
    from paceline.launch.single_attempt import run_single_attempt

    arguments = ["find-lr", *settings.as_arguments(), *arguments_of(settings)]
    threads = threads_per_rank(loaded.config.parallel, processes)
    outcome = run_single_attempt(rank_main, arguments, processes=processes, threads=threads, nodes=nodes)
    outcome.print_error()
    return outcome.exit_code


def _parse_rates(text: str) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        raise UserError("rates are not LOW:HIGH", where=_FLAG, got=text, allowed="for example 1e-5:1") from None
    if not 0 < low < high < float("inf"):
        raise UserError("rates are not a range", where=_FLAG, got=text, allowed="two numbers above 0, the lower first")
    return low, high


def _check_page(page: Path) -> None:
    if page.is_dir() or not page.parent.is_dir():
        what = "is a folder" if page.is_dir() else "has no folder"
        raise UserError(
            f"the page {what}", where="flag --output", got=str(page), allowed="a file in a folder that exists"
        )


def _be_a_rank(
    loaded: LoadedConfig, environment: RankEnvironment, rates: tuple[float, float], steps: int, page: Path
) -> int:
    from paceline.tools.bench.learning_rates import describe, find_rates, table_of, write_rates_page

    found = find_rates(loaded.config, environment, rates, steps)
    if environment.rank:
        return EXIT_FINISHED
    if not found.points:
        raise PacelineError("the first step is not finite", where=loaded.recipe_name, hint="a lower --rates")
    table = table_of(found)
    print("".join(f"{column:>14}" for column in table.columns))
    for row in table.rows:
        print("".join(f"{value:>14.4g}" for value in row))
    print(f"\n{describe(found, rates)}")
    print(f"plot      {write_rates_page(page, loaded.recipe_name, found, rates)}")
    return EXIT_FINISHED


COMMANDS = (Command("find-lr", FindLr, find_lr),)
