"""The cells of a study: strategies x world sizes x scalings x repeats. Each cell is an ordinary run.

Cells differ only in these. Settings that would otherwise differ (CPU threads per rank, the length of the run) get one
value for all cells, and the report states it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args

from paceline.errors import UserError
from paceline.launch.request import read_request
from paceline.runs.folder import write_json
from paceline.runs.json_files import Fields, ListOf, Number, Word, fit, read_bounded
from paceline.runtime.detect import count_gpus
from paceline.runtime.resources import usable_cores
from paceline.settings.declare import Arg, Range
from paceline.settings.load import LoadedConfig
from paceline.settings.rules import check_world
from paceline.settings.small_files import parse_json
from paceline.settings.values import Setting
from paceline.tools.study.shared_settings import require_same_settings, shared_settings

STUDY_FILE = "study.json"
_WHOLE = Number(1, 10**6, is_whole=True)
_SHAPE = Fields(
    required={
        **{"recipe": str, "name": str, "flags": ListOf(str), "world_sizes": ListOf(_WHOLE)},
        **{"strategies": ListOf(Word(("ddp", "fsdp"))), "repeats": Number(1, 1000, is_whole=True)},
        **{"scaling": Word(("strong", "weak", "both")), "global_batch_size": Number(1, 10**9, is_whole=True)},
        "stated": ListOf(str),
    },
    optional={"place": str, "launch": dict, "settings": dict},
)
CELLS = "cells"
BY_HAND = "by hand"  # the place of runs that no study started
Strategy = Literal["ddp", "fsdp"]
Scaling = Literal["strong", "weak", "both"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
# A study decides these for each cell.
TAKEN = ("strategy", "processes", "output_dir", "resume", "rehearse", "global_batch_size", "inject")
MOST_RANKS = 4096
MOST_REPEATS = 100
_EPOCHS = 3  # the first warms up, the others are measured


@dataclass(frozen=True)
class Cell:
    """One run."""

    strategy: str
    world_size: int
    scaling: str  # always strong for world size 1, where both are the same run
    repeat: int
    global_batch_size: int

    @property
    def name(self) -> str:
        kind = "" if self.scaling == "strong" else "weak-"
        return f"{kind}{self.strategy}-{self.world_size}-r{self.repeat}"

    @property
    def key(self) -> tuple[str, str, int]:
        """Cells of one key are repeats of each other."""
        return self.scaling, self.strategy, self.world_size


class CellSpec(Protocol):
    """What running the cells needs to know: of a study, or of a sweep."""

    @property
    def name(self) -> str: ...

    @property
    def stated(self) -> tuple[str, ...]: ...

    @property
    def headline(self) -> str:
        """One line about the whole grid."""
        ...

    @property
    def continues_cells(self) -> bool:
        """Whether an interrupted cell continues from its checkpoint; else it starts again."""
        ...

    def cells(self) -> Iterator[Cell]: ...

    def command(self, cell: Cell, folder: Path) -> list[str]: ...


@dataclass(frozen=True)
class StudySpec:
    """The request, as kept in study.json."""

    recipe: str  # a shipped name, or the path of a file
    name: str
    flags: tuple[str, ...]  # of every cell
    world_sizes: tuple[int, ...]
    strategies: tuple[str, ...]
    repeats: int
    scaling: str
    global_batch_size: int  # strong: of every cell; weak: per rank, multiplied by the ranks
    stated: tuple[str, ...] = ()  # settings that the study chose, as text
    place: str = "local"  # or slurm, or by hand
    launch: dict[str, Any] = field(default_factory=dict)  # for Slurm: nodes and other options, as given
    settings: dict[str, Any] = field(default_factory=dict)  # of every cell, as resolved from recipe and flags
    continues_cells = False  # a cell is measured in one piece

    @property
    def headline(self) -> str:
        sizes = ", ".join(map(str, self.world_sizes))
        return (
            f"study     {self.name}: {' and '.join(self.strategies)} on {sizes} ranks, {self.repeats} runs each, "
            f"{self.scaling} scaling; {sum(1 for _ in self.cells())} cells"
        )

    def cells(self) -> Iterator[Cell]:
        """Ordered by repeat, so a slow drift of the machine affects all cells equally."""
        scalings = ("strong", "weak") if self.scaling == "both" else (self.scaling,)
        for repeat in range(1, self.repeats + 1):
            seen = set()
            for scaling in scalings:
                for strategy in self.strategies:
                    for size in self.world_sizes:
                        is_weak = scaling == "weak" and size > 1
                        batch = self.global_batch_size * (size if is_weak else 1)
                        cell = Cell(strategy, size, "weak" if is_weak else "strong", repeat, batch)
                        if cell.name not in seen:
                            seen.add(cell.name)
                            yield cell

    def command(self, cell: Cell, folder: Path) -> list[str]:
        """The arguments of `paceline` for one cell; on Slurm the script adds the number of ranks."""
        ranks = [f"--processes={cell.world_size}"] if self.place == "local" else []
        return [
            *("train", self.recipe, *self.flags, f"--strategy={cell.strategy}"),
            *(f"--global-batch-size={cell.global_batch_size}", *ranks, f"--output-dir={folder / CELLS / cell.name}"),
        ]


def write_spec(folder: Path, spec: StudySpec) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STUDY_FILE, asdict(spec))


def read_spec(folder: Path) -> StudySpec:
    path = folder / STUDY_FILE
    try:
        values = fit(parse_json(read_bounded(path)), _SHAPE)
        tuples = {name: tuple(values[name]) for name in ("flags", "world_sizes", "strategies", "stated")}
        known = {field.name for field in fields(StudySpec)}
        return StudySpec(**{**{name: value for name, value in values.items() if name in known}, **tuples})
    except FileNotFoundError as error:
        raise UserError("this is not a study", where=str(folder), hint="a folder that paceline study wrote") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError("this study cannot be read", where=str(path), got=str(error)) from error


def refuse_foreign_files(folder: Path, kind: str) -> None:
    """A study or a sweep writes and removes files in its folder, so the folder must not contain other files."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise UserError(f"the folder of a {kind} is a file", where="flag --output-dir", got=str(folder)) from error
    if names:
        raise UserError(
            f"this folder has files that do not belong to a {kind}",
            where=str(folder),
            got=", ".join(names[:5]) + (", ..." if len(names) > 5 else ""),
            hint=f"another --output-dir: a new or empty folder, or that of a {kind}",
        )


def continue_study(folder: Path, spec: StudySpec) -> StudySpec:
    """An existing study may grow, but its settings may not change."""
    if not (folder / STUDY_FILE).exists():
        refuse_foreign_files(folder, "study")
        return spec
    before = read_spec(folder)
    for name in ("recipe", "flags", "global_batch_size", "place"):
        old, new = getattr(before, name), getattr(spec, name)
        if old != new:
            raise UserError(
                "another study is in this folder",
                where=str(folder),
                got=f"{name.replace('_', ' ')}: {_show(new)}; there: {_show(old)}",
                hint="--output-dir PATH for a new one, or use the same flags to continue",
            )
    require_same_settings(folder, "study", before.settings, spec.settings)
    kinds = {before.scaling, spec.scaling}
    return replace(
        spec,
        world_sizes=tuple(sorted({*before.world_sizes, *spec.world_sizes})),
        strategies=tuple(s for s in STRATEGIES if s in {*before.strategies, *spec.strategies}),
        repeats=max(before.repeats, spec.repeats),
        scaling=kinds.pop() if len(kinds) == 1 else "both",
    )


def _show(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


# Turns the command line into a study. Every cell is checked before the first one starts.


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
    recipe, of_cells = recipe_argument(loaded), (*_without_batch(flags), *added)
    return StudySpec(
        recipe=recipe,
        name=loaded.recipe_name,
        flags=of_cells,
        world_sizes=tuple(sizes),
        strategies=tuple(strategy for strategy in STRATEGIES if strategy in asked.strategies),
        repeats=asked.repeats,
        scaling=asked.scaling,
        global_batch_size=loaded.config.train.global_batch_size,
        stated=tuple(stated),
        place=place,
        settings=shared_settings(recipe, of_cells, TAKEN),
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
