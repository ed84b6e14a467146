"""`paceline study predict`: what a study says about sizes that were not measured."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from paceline.cli.command import Command
from paceline.errors import EXIT_FINISHED, UserError
from paceline.settings.declare import Arg, Range
from paceline.settings.values import Setting, invalid
from paceline.tools.study.model import Link

if TYPE_CHECKING:
    from paceline.tools.study.collect import Measured
    from paceline.tools.study.model import Prediction, StepModel

_SPEED = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kKMGT]?)(?P<kind>bit|B)/s")
_LATENCY = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>us|µs|ms|ns)")
_FACTORS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "ns": 1e-9}
_MOST_RANKS = 1_000_000
_POSITIVE = Range(low=0, open_low=True)


def parse_link(text: str, setting: Setting) -> Link:
    """100Gbit/s,2us or 12.5GB/s,2us."""
    speed, _, latency = text.partition(",")
    fast, late = _SPEED.fullmatch(speed.strip()), _LATENCY.fullmatch(latency.strip() or "0us")
    if fast is None or late is None or float(fast["number"]) == 0:
        raise invalid(setting, text, "a speed and a latency, as 100Gbit/s,2us")
    bits = float(fast["number"]) * _FACTORS[fast["unit"]] * (8 if fast["kind"] == "B" else 1)
    return Link(bits, float(late["number"]) * _FACTORS[late["unit"]])


@dataclass(frozen=True)
class Predict:
    """Predict the times of sizes that were not measured, from the cells of a study."""

    study: Annotated[Path, Arg(place="word")]
    """The folder of the study, or its results.csv."""
    world_sizes: Annotated[
        tuple[int, ...],
        Range(low=1, high=_MOST_RANKS),
        Arg("N,N", many="commas", allowed="whole numbers, as 16,64,256"),
    ] = (16, 64, 256)
    """Numbers of ranks."""
    link: Annotated[Link | None, Arg("SPEED,LATENCY", parse=parse_link)] = None
    """The network between them, for example 100Gbit/s,2us."""
    epochs: Annotated[float, _POSITIVE] = 1.0
    """Epochs of the training."""
    price: Annotated[float | None, _POSITIVE] = None
    """Price of one rank for an hour, in any currency."""
    batch: Annotated[int | None, Range(low=1)] = None
    """The global batch (the study's unless given)."""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: the same batch on all ranks. weak: times the ranks."""
    json: bool = False
    """Print JSON."""


def predict(settings: Predict) -> int:
    from paceline.tools.study.model import fit

    sizes, link, epochs, price = sorted(set(settings.world_sizes)), settings.link, settings.epochs, settings.price
    cells = _read_cells(settings.study)
    batch = settings.batch or cells[0].cell.global_batch_size
    samples = cells[0].steps_per_epoch * cells[0].cell.global_batch_size
    strategies = dict.fromkeys(cell.cell.strategy for cell in cells)
    where = str(settings.study)
    try:
        models = {strategy: model for strategy in strategies if (model := fit(cells, strategy)) is not None}
        table = {
            name: [_predict_one(model, size, batch, settings.scaling, link) for size in sizes]
            for name, model in models.items()
        }
        rows = [_row(name, one, epochs * samples, price) for name, found in table.items() for one in found]
    except ArithmeticError as error:
        raise UserError("the times of this study are too large or too small", where=where, got=str(error)) from error
    if not models:
        allowed = "finished cells of at least two world sizes"
        raise UserError("one world size is not enough for a prediction", where=where, allowed=allowed)
    if settings.json:
        print(json.dumps(rows, indent=2))
    else:
        _print(rows, models, cells, link, epochs, has_price=price is not None)
    return EXIT_FINISHED


def _read_cells(path: Path) -> list[Measured]:
    from paceline.tools.study.collect import CSV_FILE, collect, read_csv
    from paceline.tools.study.grid import STUDY_FILE, read_spec

    if not (path / STUDY_FILE).exists() and (path / CSV_FILE).exists():
        path = path / CSV_FILE  # runs that were started by hand
    cells = read_csv(path) if path.is_file() else collect(path, read_spec(path))
    if not cells:
        raise UserError("no cell of this study has finished", where=str(path))
    return cells


def _predict_one(model: StepModel, size: int, batch: int, scaling: str, link: Link | None) -> Prediction:
    samples = batch / size if scaling == "strong" else float(batch)
    if samples < 1:
        raise UserError(
            f"{size} ranks share {batch} samples",
            where="flag --world-sizes",
            allowed=f"up to {batch} ranks",
            hint="--scaling weak, or a larger --batch",
        )
    return model.predict(size, samples, link)


def _row(strategy: str, found: Prediction, samples: float, price: float | None) -> dict[str, object]:
    batch = found.samples_per_rank * found.world_size
    hours = [
        None if step is None else samples / batch * step / 3600
        for step in (found.step_s.value, found.step_s.low, found.step_s.high)
    ]
    row: dict[str, object] = {
        "strategy": strategy,
        "world_size": found.world_size,
        "global_batch_size": round(batch),
        "step_ms": [_ms(found.step_s.value), _ms(found.step_s.low), _ms(found.step_s.high)],
        "images_per_second": batch / found.step_s.value,
        "efficiency": [found.efficiency.value, found.efficiency.low, found.efficiency.high],
        "hours": hours,
    }
    if price is not None:
        row["cost"] = [None if h is None else h * found.world_size * price for h in hours]
    return row


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _print(
    rows: list[dict[str, object]],
    models: dict[str, StepModel],
    cells: list[Measured],
    link: Link | None,
    epochs: float,
    *,
    has_price: bool,
) -> None:
    from paceline.tools.study.model import hold_out

    knows_steps = any(cell.steps_per_epoch > 1 for cell in cells)  # a recorded table may know epochs only
    length = f"{epochs:g} epoch" + ("s" if epochs != 1 else "")
    head = ["strategy", "ranks", "batch", "step ms" if knows_steps else "epoch ms", "images/s", "efficiency", length]
    lines = [head + (["cost"] if has_price else [])]
    for row in rows:
        line = [str(row["strategy"]), str(row["world_size"]), f"{row['global_batch_size']:,}"]
        line += [_range(row["step_ms"], "{:,.3g}"), f"{row['images_per_second']:,.0f}" if knows_steps else "-"]
        line += [_range(row["efficiency"], "{:.0%}"), _duration(row["hours"])]
        lines.append(line + ([_range(row["cost"], "{:,.2f}")] if has_price else []))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print()
    for strategy, model in models.items():
        sizes = ", ".join(map(str, model.sizes))
        held = hold_out(cells, strategy)
        check = f"; without the largest it is off by {held[2]:+.1%} there" if held else ""
        print(f"{strategy}: fitted to {sizes} ranks, noise of a run {model.noise:.1%}{check}")
        if len([size for size in model.sizes if size > 1]) < 2 and link is None:
            print(f"  {_ONE_SIZE}")
    print("in brackets: 95 % intervals, from the noise of the cells; they do not cover another kind of machine")


_ONE_SIZE = "only one size beyond one rank was run, so how communication grows is not known: --link helps"


def _range(values: object, form: str) -> str:
    assert isinstance(values, list)
    value, low, high = values
    if low is None:
        return form.format(value)
    return f"{form.format(value)} ({form.format(low)} to {form.format(high)})"


def _duration(hours: object) -> str:
    """In a unit that suits the value."""
    assert isinstance(hours, list)
    unit, per_hour = next((u, f) for u, f in (("s", 3600.0), ("min", 60.0), ("h", 1.0)) if hours[0] * f < 120 or f == 1)
    return _range([None if h is None else h * per_hour for h in hours], "{:,.3g}") + f" {unit}"


COMMANDS = (Command("study predict", Predict, predict),)
