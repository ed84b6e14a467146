"""Turns the command line into a study. Every cell is checked before the first one starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.errors import UserError
from paceline.launch.request import read_request
from paceline.runtime.cores import usable_cores
from paceline.runtime.detect import count_gpus
from paceline.settings.declare import Arg, Range
from paceline.settings.load import LoadedConfig
from paceline.settings.rules import check_world
from paceline.settings.values import Setting
from paceline.tools.study.grid import STRATEGIES, TAKEN, Scaling, Strategy, StudySpec

MOST_RANKS = 4096
MOST_REPEATS = 100
_EPOCHS = 3  # the first warms up, the others are measured


@dataclass(frozen=True)
class Asked:
    """The study's own settings."""

    world_sizes: Annotated[
        tuple[int, ...],
        Range(low=1, high=MOST_RANKS),
        Arg("N,N", many="commas", allowed=f"whole numbers from 1 to {MOST_RANKS}, for example 1,2,4"),
    ] = ()
    """Numbers of ranks (1, 2, 4, ... up to the limit of this machine, unless given)."""
    strategies: Annotated[tuple[Strategy, ...], Arg("LIST", many="commas")] = ("ddp",)
    """Strategies."""
    repeats: Annotated[int, Range(low=1, high=MOST_REPEATS)] = 3
    """Runs of each cell, for intervals."""
    scaling: Scaling = "strong"
    """strong: the same global batch for all. weak: the recipe's for one rank, times the ranks. both."""


def refuse_taken(flags: Sequence[Setting]) -> None:
    """Checked before any value: --world-size 1,2 is probably meant as --world-sizes."""
    hints = {"strategy": "--strategies ddp,fsdp", "processes": "--world-sizes 1,2,4"}
    for setting in flags:
        name = setting.field.name
        if name in TAKEN and name != "global_batch_size":
            hint = hints.get(name, "leave it out")
            raise UserError("the study decides this for each cell", where=setting.where, hint=hint)


def plan_study(
    loaded: LoadedConfig, asked: Asked, flags: Sequence[Setting], *, place: str, threads: int = 0
) -> StudySpec:
    """`flags` are for every cell. Settings that must be equal in all cells are added to them and stated.

    threads: per rank on CPUs, from the jobs of a cluster; 0 on GPUs, and on this machine, where they are counted here.
    """
    sizes = sorted(set(asked.world_sizes or _default_sizes(loaded)))
    added, stated = _settle(loaded, sizes, place, threads)
    return StudySpec(
        recipe=recipe_argument(loaded),
        name=loaded.recipe_name,
        flags=(*_without_batch(flags), *added),
        world_sizes=tuple(sizes),
        strategies=tuple(strategy for strategy in STRATEGIES if strategy in asked.strategies),
        repeats=asked.repeats,
        scaling=asked.scaling,
        global_batch_size=loaded.config.train.global_batch_size,
        stated=tuple(stated),
        place=place,
    )


def check_cells(spec: StudySpec) -> None:
    """Every check that `train` would make of any cell, before the first one starts."""
    for strategy, size, batch in {(c.strategy, c.world_size, c.global_batch_size) for c in spec.cells()}:
        flags = [*spec.flags, f"--strategy={strategy}", f"--global-batch-size={batch}"]
        check_world(read_request(spec.recipe, flags), size)


def _settle(loaded: LoadedConfig, sizes: list[int], place: str, threads: int) -> tuple[list[str], list[str]]:
    """Flags that make the cells comparable, and statements about them."""
    config, flags, stated = loaded.config, [], []
    gpus = count_gpus(config.parallel) if place == "local" else 0
    cores = usable_cores()
    if place == "local" and not gpus:
        threads = max(1, cores // max(sizes))
    if threads and loaded.origin("omp_num_threads") == "default":
        flags.append(f"--omp-num-threads={threads}")
        stated.append(f"{threads} CPU thread" + ("s" if threads > 1 else "") + " per rank in every cell")
    if place == "local" and not gpus and max(sizes) > cores:
        crowded = ", ".join(str(size) for size in sizes if size > cores)
        stated.append(f"oversubscribed: {crowded} ranks share {cores} cores, so this does not measure scaling")
    if {loaded.origin("epochs"), loaded.origin("max_steps")}.isdisjoint({"flag"}):
        epochs = min(config.train.epochs, max(_EPOCHS, int(config.optim.warmup_epochs) + 2))
        flags.append(f"--epochs={epochs}")
        stated.append(f"{epochs} of the recipe's {config.train.epochs} epochs per cell; the first is not timed")
    return flags, stated


def _default_sizes(loaded: LoadedConfig) -> list[int]:
    """1, 2, 4, ... up to the limit of this machine."""
    most = count_gpus(loaded.config.parallel) or usable_cores()
    sizes = [1]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return sizes


def _without_batch(flags: Sequence[Setting]) -> list[str]:
    """The flags without the global batch, which the study sets for each cell."""
    kept = [setting for setting in flags if setting.field.name != "global_batch_size"]
    return [token for setting in kept for token in setting.tokens()]


def recipe_argument(loaded: LoadedConfig) -> str:
    """The recipe as an argument of `paceline train` in any working folder."""
    from paceline.settings.recipe_file import shipped_recipes

    is_shipped = shipped_recipes().get(loaded.recipe_path.stem) == loaded.recipe_path
    return loaded.recipe_path.stem if is_shipped else str(Path(loaded.recipe_path).absolute())
