"""A sweep: one run for each combination of some settings and each seed. Cells run with the machinery of studies.

A cell is named by its settings, so a sweep can grow: the same command with more values runs only the new cells. An
interrupted cell continues from its newest checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.runs.folder import write_json
from paceline.runs.json_files import Fields, ListOf, Number, fit, read_bounded
from paceline.settings.schema import field_table
from paceline.settings.small_files import parse_json
from paceline.settings.values import unknown_name
from paceline.tools.study.grid import CELLS, Cell, refuse_foreign_files
from paceline.tools.study.shared_settings import require_same_settings

SWEEP_FILE = "sweep.json"
SEED = "seed"
MOST_CELLS = 2000
# The sweep decides these for each cell, or they are of no use in one.
TAKEN = ("output_dir", "resume", "load_policy", "best_is_latest", "rehearse", "inject", "profile")
_WHERE = "the command line"
_WHOLE = Number(1, 10**9, is_whole=True)
_SHAPE = Fields(
    required={
        **{"recipe": str, "name": str, "flags": ListOf(str), "place": str, "stated": ListOf(str)},
        **{"world_size": _WHOLE, "global_batch_size": _WHOLE, "points": ListOf(ListOf(ListOf(str)))},
    },
    optional={"settings": dict},
)
_EXAMPLES = "base_lr=0.1,0.2, seed=1..3, or with --random N also base_lr=0.01..1"

Point = tuple[tuple[str, str], ...]  # (setting, value), with the seed if it is varied


@dataclass(frozen=True)
class SweepCell(Cell):
    """One run of a sweep."""

    settings: Point = ()

    @property
    def name(self) -> str:
        """Readable, allowed as a folder name, and different for different settings."""
        words = "_".join(f"{name}-{value}" for name, value in self.settings)
        digest = hashlib.sha256(repr(self.settings).encode()).hexdigest()[:6]
        return f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', words)[:60]}-{digest}"

    @property
    def without_seed(self) -> Point:
        """Cells with the same settings but another seed are repeats of each other."""
        return tuple((name, value) for name, value in self.settings if name != SEED)


@dataclass(frozen=True)
class Axis:
    """One setting and its values, or an interval to draw from."""

    name: str
    values: tuple[str, ...]
    interval: tuple[float, float] | None = None

    def draw(self, number: int) -> str:
        """The value of random point number `number`: a function of the number and the name."""
        source = random.Random(f"{number} {self.name}")
        if self.interval is None:
            return source.choice(self.values)
        low, high = self.interval
        if low > 0:  # learning rates and the like: each factor of ten is equally likely
            return f"{math.exp(source.uniform(math.log(low), math.log(high))):.4g}"
        return f"{source.uniform(low, high):.4g}"


@dataclass(frozen=True)
class SweepSpec:
    """The request, as kept in sweep.json."""

    recipe: str
    name: str
    flags: tuple[str, ...]  # of every cell
    points: tuple[Point, ...]
    world_size: int
    global_batch_size: int
    place: str = "local"
    stated: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)  # that all cells share
    continues_cells = True  # an interrupted cell continues from its checkpoint

    @property
    def headline(self) -> str:
        varied = dict.fromkeys(name for point in self.points for name, _ in point)
        return f"sweep     {self.name}: {', '.join(varied)}; {len(self.points)} cells"

    def cells(self) -> Iterator[SweepCell]:
        for point in self.points:
            batch = dict(point).get("global_batch_size", "")  # checked with all other values, later
            batch_size = int(batch) if batch.isdecimal() else self.global_batch_size
            yield SweepCell("", self.world_size, "strong", 1, batch_size, point)

    def command(self, cell: Cell, folder: Path) -> list[str]:
        assert isinstance(cell, SweepCell)
        return [
            *("train", self.recipe, *self.flags, *flags_of(cell.settings)),
            *("--resume=auto", f"--output-dir={folder / CELLS / cell.name}"),
        ]


def flags_of(point: Point) -> list[str]:
    return [f"{field_table()[name].flag}={value}" for name, value in point]


def parse_axes(words: Sequence[str], *, is_random: bool) -> list[Axis]:
    """`base_lr=0.1,0.2 seed=1..3` as axes. UserError for anything else."""
    if not words:
        raise UserError("nothing is varied", where=_WHERE, allowed=_EXAMPLES)
    axes = [_parse_axis(word, is_random=is_random) for word in words]
    names = [axis.name for axis in axes]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice", where=_WHERE, hint=f"{twice[0]}=FIRST,SECOND")
    return axes


def _parse_axis(word: str, *, is_random: bool) -> Axis:
    name, separator, text = word.partition("=")
    name = name.removeprefix("--").replace("-", "_")
    if not separator:
        raise UserError("this is not a setting with values", where=_WHERE, got=word, allowed=_EXAMPLES)
    field = field_table().get(name)
    if field is None:
        raise unknown_name(f"--{name.replace('_', '-')}", _WHERE, field_table(), "sweep")
    if name in TAKEN:
        raise UserError(f"a sweep cannot vary {name}", where=_WHERE, got=word, hint="leave it out")
    if field.is_bool or field.is_tuple:
        kind = "a switch" if field.is_bool else "a list"
        raise UserError(f"a sweep cannot vary {name}: it is {kind}", where=_WHERE, got=word, hint="use two sweeps")
    found = re.fullmatch(r"(-?[0-9.]+(?:e-?[0-9]+)?)\.\.(-?[0-9.]+(?:e-?[0-9]+)?)", text)
    if found is None:
        return Axis(name, _values(word, text))
    if field.type is int and re.fullmatch(r"-?[0-9]+", found[1]) and re.fullmatch(r"-?[0-9]+", found[2]):
        return Axis(name, _whole_numbers(word, int(found[1]), int(found[2])))
    return Axis(name, (), _interval(word, found[1], found[2], is_random=is_random and field.type is float))


def _values(word: str, text: str) -> tuple[str, ...]:
    values = [part.strip() for part in text.split(",")]
    if not all(values) or len(set(values)) < len(values):
        what = "a value is empty" if not all(values) else "a value is given twice"
        raise UserError(what, where=_WHERE, got=word, allowed=_EXAMPLES)
    return tuple(values)


def _whole_numbers(word: str, low: int, high: int) -> tuple[str, ...]:
    if not low <= high or high - low >= MOST_CELLS:
        raise UserError("this range is empty or too long", where=_WHERE, got=word, allowed="LOW..HIGH, both included")
    return tuple(map(str, range(low, high + 1)))


def _interval(word: str, low_text: str, high_text: str, *, is_random: bool) -> tuple[float, float]:
    if not is_random:
        hint = "--random N draws from it; a grid needs values: base_lr=0.1,0.2"
        raise UserError("an interval is not a list of values", where=_WHERE, got=word, allowed=_EXAMPLES, hint=hint)
    try:
        low, high = float(low_text), float(high_text)
    except ValueError as error:
        raise UserError("this is not an interval", where=_WHERE, got=word, allowed=_EXAMPLES) from error
    if not low < high or not math.isfinite(high - low):
        raise UserError("this interval is empty", where=_WHERE, got=word, allowed="LOW..HIGH")
    return low, high


def make_points(axes: Sequence[Axis], num_random: int = 0) -> tuple[Point, ...]:
    """The whole grid, or so many random points. Seeds are always combined with all others."""
    others = [axis for axis in axes if axis.name != SEED]
    seeds = [axis for axis in axes if axis.name == SEED]
    size = math.prod(len(axis.values) for axis in seeds) * (
        num_random or math.prod(len(axis.values) for axis in others)
    )
    if size > MOST_CELLS:
        raise UserError(
            "the sweep has too many cells", where=_WHERE, got=f"{size:,}", allowed=f"up to {MOST_CELLS:,}",
            hint="fewer values, or --random N",
        )  # fmt: skip
    if num_random:
        if not others:
            raise UserError("--random needs another setting than the seed", where="flag --random", allowed=_EXAMPLES)
        chosen = [tuple((axis.name, axis.draw(number)) for axis in others) for number in range(num_random)]
        points: list[Point] = list(dict.fromkeys(chosen))
    else:
        points = list(itertools.product(*([(axis.name, value) for value in axis.values] for axis in others)))
    repeats = list(itertools.product(*([(axis.name, value) for value in axis.values] for axis in seeds)))
    # Ordered by seed, so that every point has a result early.
    return tuple((*point, *repeat) for repeat in repeats for point in points)


def write_sweep(folder: Path, spec: SweepSpec) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("recipe", "name", "flags", "points", "world_size", "global_batch_size", "place", "stated", "settings")
    write_json(folder / SWEEP_FILE, {name: getattr(spec, name) for name in names})


def read_sweep(folder: Path) -> SweepSpec:
    path = folder / SWEEP_FILE
    try:
        values: dict[str, Any] = fit(parse_json(read_bounded(path)), _SHAPE)
        points = tuple(tuple((name, value) for name, value in point) for point in values["points"])
        known = {name: values[name] for name in ("recipe", "name", "world_size", "global_batch_size", "place")}
        varied = {tuple(name for name, _ in point) for point in points}
        if len(varied) != 1 or not set(*varied) <= field_table().keys():
            raise ValueError(f"points with other settings: {sorted(varied)}")
        lists: dict[str, Any] = {name: tuple(values[name]) for name in ("flags", "stated")}
        return SweepSpec(**known, **lists, points=points, settings=values.get("settings", {}))
    except FileNotFoundError as error:
        raise UserError("this is not a sweep", where=str(folder), hint="a folder that paceline sweep wrote") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError("this sweep cannot be read", where=str(path), got=str(error)) from error


def continue_sweep(folder: Path, spec: SweepSpec) -> SweepSpec:
    """An existing sweep may grow, but the settings that all its cells share may not change."""
    if not (folder / SWEEP_FILE).exists():
        refuse_foreign_files(folder, "sweep")
        return spec
    before = read_sweep(folder)
    for name in ("recipe", "flags", "place"):
        old, new = getattr(before, name), getattr(spec, name)
        if old != new:
            raise UserError(
                "another sweep is in this folder",
                where=str(folder),
                got=f"{name}: {_show(new)}; there: {_show(old)}",
                hint="--output-dir PATH for a new one, or use the same flags to continue",
            )
    names = {name for name, _ in before.points[0]}
    if {name for name, _ in spec.points[0]} != names:
        raise UserError(
            "the sweep in this folder varies other settings",
            where=str(folder),
            got=", ".join(name for name, _ in spec.points[0]),
            allowed=", ".join(sorted(names)),
            hint="--output-dir PATH for a new one",
        )
    require_same_settings(folder, "sweep", before.settings, spec.settings)
    merged = dict.fromkeys(tuple(sorted(point)) for point in (*before.points, *spec.points))
    order = [name for name, _ in before.points[0]]
    points = tuple(tuple(sorted(point, key=lambda item: order.index(item[0]))) for point in merged)
    return replace(spec, points=points)


def _show(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
