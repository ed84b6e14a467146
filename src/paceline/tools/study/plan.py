"""Turns the command line into a study. Every cell is checked before the first one starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.runtime.cores import usable_cores
from paceline.runtime.detect import count_gpus
from paceline.settings.load import LoadedConfig, parse_flags
from paceline.tools.study.grid import SCALINGS, STRATEGIES, TAKEN, StudySpec

_MOST_RANKS = 4096
_MOST_REPEATS = 100
_EPOCHS = 3  # the first warms up, the others are measured


@dataclass(frozen=True)
class Asked:
    """The study's own flags, as given."""

    world_sizes: str = ""
    strategies: str = "ddp"
    repeats: str = "3"
    scaling: str = "strong"


def refuse_taken(flags: list[str]) -> None:
    """Checked before any value: --world-size 1,2 is probably meant as --world-sizes."""
    hints = {"strategy": "--strategies ddp,fsdp", "processes": "--world-sizes 1,2,4"}
    for setting in parse_flags(flags):
        name = setting.field.name
        if name in TAKEN and name != "global_batch_size":
            hint = hints.get(name, "leave it out")
            raise UserError("the study decides this for each cell", where=setting.where, hint=hint)


def plan_study(loaded: LoadedConfig, asked: Asked, flags: list[str], *, place: str, threads: int = 0) -> StudySpec:
    """`flags` are for every cell. Settings that must be equal in all cells are added to them and stated.

    threads: per rank on CPUs, from the jobs of a cluster; 0 on GPUs, and on this machine, where they are counted here.
    """
    sizes = _numbers("--world-sizes", asked.world_sizes or _default_sizes(loaded), most=_MOST_RANKS)
    repeats = _numbers("--repeats", asked.repeats, most=_MOST_REPEATS)
    if len(repeats) != 1:
        raise UserError("repeats is one number", where="flag --repeats", got=asked.repeats)
    strategies = _choices("--strategies", asked.strategies, STRATEGIES)
    scaling = _choices("--scaling", asked.scaling, SCALINGS)
    if len(scaling) != 1:
        raise UserError("one kind of scaling", where="flag --scaling", got=asked.scaling, hint="--scaling both")
    added, stated = _settle(loaded, sizes, place, threads)
    return StudySpec(
        recipe=_recipe(loaded),
        name=loaded.recipe_name,
        flags=(*_without_batch(flags), *added),
        world_sizes=tuple(sizes),
        strategies=tuple(strategies),
        repeats=repeats[0],
        scaling=scaling[0],
        global_batch_size=loaded.config.train.global_batch_size,
        stated=tuple(stated),
        place=place,
    )


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


def _default_sizes(loaded: LoadedConfig) -> str:
    """1, 2, 4, ... up to the limit of this machine."""
    most = count_gpus(loaded.config.parallel) or usable_cores()
    sizes = [1]
    while 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return ",".join(map(str, sizes))


def _numbers(flag: str, text: str, *, most: int) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdecimal() and 1 <= int(word) <= most for word in words):
        raise UserError(
            f"{flag} {text!r} is not valid",
            where=f"flag {flag}",
            allowed=f"whole numbers from 1 to {most}, for example 1,2,4",
        )
    return sorted({int(word) for word in words})


def _choices(flag: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or set(words) - set(allowed):
        raise UserError(f"{flag} {text!r} is not valid", where=f"flag {flag}", allowed=", ".join(allowed))
    return [choice for choice in allowed if choice in words]


def _without_batch(flags: list[str]) -> list[str]:
    """The flags without the global batch, which the study sets for each cell."""
    kept: list[str] = []
    for setting in parse_flags(flags):
        if setting.field.name != "global_batch_size":
            kept += setting.tokens()
    return kept


def _recipe(loaded: LoadedConfig) -> str:
    from paceline.settings.recipe_file import shipped_recipes

    is_shipped = shipped_recipes().get(loaded.recipe_path.stem) == loaded.recipe_path
    return loaded.recipe_path.stem if is_shipped else str(Path(loaded.recipe_path).absolute())
