"""`paceline study predict STUDY --world-sizes 16,64`: what sizes nobody has run would do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.submit_common import split_flags
from paceline.errors import EXIT_FINISHED, UserError
from paceline.settings.sites import JobSetting

if TYPE_CHECKING:
    from paceline.tools.study.collect import Measured
    from paceline.tools.study.model import Link, Prediction, StepModel

_OWN = {
    "world_sizes": JobSetting("world_sizes", "N,N", "numbers of ranks, as 16,64,256"),
    "link": JobSetting("link", "SPEED,LATENCY", "the network between them, as 100Gbit/s,2us"),
    "epochs": JobSetting("epochs", "N", "how long a training"),
    "price": JobSetting("price", "NUMBER", "of one rank for an hour, in any currency"),
    "batch": JobSetting("batch", "N", "the global batch, if not the study's"),
    "scaling": JobSetting("scaling", "KIND", "strong: the study's batch on all ranks; weak: times the ranks"),
    "json": JobSetting("json", "", "for machines", "switch"),
}
_SPEED = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kKMGT]?)(?P<kind>bit|B)/s")
_LATENCY = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>us|µs|ms|ns)")
_FACTORS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "ns": 1e-9}
_MOST_RANKS = 1_000_000


def predict(arguments: list[str]) -> int:
    from paceline.tools.study.model import fit

    typed, rest = split_flags(arguments, _OWN)
    values = {name: given.values[-1] for name, given in typed.items()}
    if len(rest) != 1 or rest[0].startswith("-"):
        raise UserError(
            "predict needs one study",
            got=" ".join(rest) or "none",
            hint="paceline study predict STUDY --world-sizes 16,64",
        )
    sizes = _sizes(values.get("world_sizes", "16,64,256"))
    link = read_link(values["link"]) if "link" in values else None
    scaling = values.get("scaling", "strong")
    if scaling not in ("strong", "weak"):
        raise UserError(f"--scaling {scaling!r} is not valid", where="flag --scaling", allowed="strong, weak")
    cells = _read_cells(Path(rest[0]))
    batch = int(_positive(values, "batch") or cells[0].cell.global_batch_size)
    epochs, price = _positive(values, "epochs") or 1.0, _positive(values, "price")
    samples = cells[0].steps_per_epoch * cells[0].cell.global_batch_size
    strategies = dict.fromkeys(cell.cell.strategy for cell in cells)
    try:
        models = {strategy: model for strategy in strategies if (model := fit(cells, strategy)) is not None}
        table = {name: [_ask(model, size, batch, scaling, link) for size in sizes] for name, model in models.items()}
        rows = [_row(name, p, epochs * samples, price) for name, said in table.items() for p in said]
    except ArithmeticError as error:
        raise UserError("the times of this study are too large or too small", where=rest[0], got=str(error)) from error
    if not models:
        raise UserError(
            "one size says nothing of scale", where=rest[0], allowed="finished cells of at least two world sizes"
        )
    if "json" in typed:
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


def _ask(model: StepModel, size: int, batch: int, scaling: str, link: Link | None) -> Prediction:
    samples = batch / size if scaling == "strong" else float(batch)
    if samples < 1:
        raise UserError(
            f"{size} ranks share {batch} samples",
            where="flag --world-sizes",
            allowed=f"up to {batch} ranks",
            hint="--scaling weak, or a larger --batch",
        )
    return model.predict(size, samples, link)


def _row(strategy: str, said: Prediction, samples: float, price: float | None) -> dict[str, object]:
    batch = said.samples_per_rank * said.world_size
    hours = [
        None if step is None else samples / batch * step / 3600
        for step in (said.step_s.value, said.step_s.low, said.step_s.high)
    ]
    row: dict[str, object] = {
        "strategy": strategy,
        "world_size": said.world_size,
        "global_batch_size": round(batch),
        "step_ms": [_ms(said.step_s.value), _ms(said.step_s.low), _ms(said.step_s.high)],
        "images_per_second": batch / said.step_s.value,
        "efficiency": [said.efficiency.value, said.efficiency.low, said.efficiency.high],
        "hours": hours,
    }
    if price is not None:
        row["cost"] = [None if h is None else h * said.world_size * price for h in hours]
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
    print("in brackets: 95 % intervals, by the cells' own noise; a machine of another kind is not in them")


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


def read_link(text: str) -> Link:
    """100Gbit/s,2us or 12.5GB/s,2us."""
    from paceline.tools.study.model import Link

    speed, _, latency = text.partition(",")
    fast, late = _SPEED.fullmatch(speed.strip()), _LATENCY.fullmatch(latency.strip() or "0us")
    if fast is None or late is None or float(fast["number"]) == 0:
        raise UserError(
            f"--link {text!r} is not valid", where="flag --link", allowed="a speed and a latency, as 100Gbit/s,2us"
        )
    bits = float(fast["number"]) * _FACTORS[fast["unit"]] * (8 if fast["kind"] == "B" else 1)
    return Link(bits, float(late["number"]) * _FACTORS[late["unit"]])


def _sizes(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(w.isascii() and w.isdecimal() and 1 <= int(w) <= _MOST_RANKS for w in words):
        raise UserError(
            f"--world-sizes {text!r} is not valid", where="flag --world-sizes", allowed="whole numbers, as 16,64,256"
        )
    return sorted({int(word) for word in words})


def _positive(values: dict[str, str], name: str) -> float | None:
    if name not in values:
        return None
    try:
        number = float(values[name])
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"--{name} {values[name]!r} is not valid", where=f"flag --{name}", allowed="a number above 0")
    return number
