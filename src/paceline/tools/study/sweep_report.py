"""The output of a sweep: a table with mean and deviation over seeds, sweep.csv, plots, and one page."""

from __future__ import annotations

import csv
import io
import os
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import paceline
from paceline.errors import UserError
from paceline.reports.charts import Chart, Series, Table
from paceline.reports.page import Block, Section, Tile, Tiles, write_page
from paceline.runs.folder import write_atomically
from paceline.tools.study.collect import Measured
from paceline.tools.study.plots import PLOTS, write_plots
from paceline.tools.study.sweep import SEED, Point, SweepCell, SweepSpec

Metric = Literal["val_accuracy", "val_loss", "test_accuracy", "test_loss"]
PAGE, TABLE = "report.html", "sweep.csv"
_FIELDS = {
    "val_accuracy": "best_val_accuracy",
    "val_loss": "best_val_loss",
    "test_accuracy": "test_accuracy",
    "test_loss": "test_loss",
}
_INSTEAD: dict[Metric, tuple[Metric, ...]] = {
    "val_accuracy": ("test_accuracy", "val_loss", "test_loss"),
    "val_loss": ("test_loss",),
    "test_accuracy": ("test_loss",),
    "test_loss": (),
}
_TITLES = {
    "val_accuracy": "validation accuracy",
    "val_loss": "validation loss",
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
}
_MOST_BARS, _MOST_CURVES = 40, 6


@dataclass(frozen=True)
class Result:
    """The runs of one combination of settings, over their seeds."""

    point: Point  # without the seed
    values: tuple[float, ...]  # of the metric
    test_values: tuple[float, ...]  # test accuracy

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def words(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.point) or "the recipe"


def collect_results(cells: Sequence[Measured], metric: Metric) -> list[Result]:
    """Best first. Without a validation set, the test decides (with the metric of the same kind)."""
    groups: dict[Point, list[Measured]] = defaultdict(list)
    for found in cells:
        assert isinstance(found.cell, SweepCell)
        groups[found.cell.without_seed].append(found)
    results = []
    for point, group in groups.items():
        values = [value for found in group if (value := getattr(found, _FIELDS[metric])) is not None]
        tests = [found.test_accuracy for found in group if found.test_accuracy is not None]
        if values:
            results.append(Result(point, tuple(values), tuple(tests)))
    return sorted(results, key=lambda result: result.mean, reverse=metric.endswith("accuracy"))


def metric_with_values(cells: Sequence[Measured], metric: Metric) -> Metric:
    """The metric, or the first that the runs have instead: without a validation set, or as a regression."""
    names = (metric, *_INSTEAD[metric])
    return next((name for name in names if any(getattr(found, _FIELDS[name]) is not None for found in cells)), metric)


def write_sweep_report(
    folder: Path, spec: SweepSpec, cells: Sequence[Measured], metric: Metric, failed: Sequence[tuple[str, str]]
) -> list[str]:
    """Write table, plots and page. Returns the lines to print."""
    metric = metric_with_values(cells, metric)
    results = collect_results(cells, metric)
    _write_table(folder / TABLE, spec, cells)
    charts = make_sweep_charts(results, metric)
    lines = [*describe_results(results, metric), f"table     {os.path.relpath(folder / TABLE)} ({len(cells)} rows)"]
    try:
        write_plots(folder, charts)
        lines.append(f"plots     {os.path.relpath(folder / PLOTS)}/ ({len(charts)}, each as PNG and SVG)")
    except UserError as error:
        lines.append(f"note      no plots as files: {error.hint}")
    _write_page(folder, spec, results, metric, charts, failed)
    return [*lines, f"page      {os.path.relpath(folder / PAGE)}"]


def describe_results(results: Sequence[Result], metric: Metric) -> list[str]:
    """A table as text, the best first."""
    names = [name for name, _ in results[0].point] if results else []
    rows = [(*names, "runs", _TITLES[metric], "test accuracy")]
    for result in results:
        values = [value for _, value in result.point]
        rows.append((*values, str(len(result.values)), _shown(result.values, metric), _shown(result.test_values)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*text, *([f"best      {results[0].words}"] if names else [])]


def _shown(values: Sequence[float], metric: Metric = "test_accuracy") -> str:
    """Mean and, of several runs, their standard deviation."""
    if not values:
        return "-"
    form = "{:.2%}" if metric.endswith("accuracy") else "{:.4f}"
    text = form.format(statistics.fmean(values))
    return text if len(values) < 2 else f"{text} ± {form.format(statistics.stdev(values))}"


def make_sweep_charts(results: Sequence[Result], metric: Metric) -> list[Chart]:
    """A bar for each combination, and a curve over each setting that is a number. Intervals: mean ± deviation."""
    if not results:
        return []
    best = list(results[:_MOST_BARS])
    bars = _series(_TITLES[metric], best, [result.words for result in best])
    y_format: Literal["percent", "number"] = "percent" if metric.endswith("accuracy") else "number"
    note = "Intervals: mean ± standard deviation over seeds."
    more = f" The best {_MOST_BARS} of {len(results)}." if len(results) > len(best) else ""
    title = f"{_TITLES[metric].capitalize()} of each combination"
    charts = [
        Chart("combinations", title, "", _TITLES[metric], [bars], "bar", y_format=y_format, note=note + more, wide=True)
    ]
    for name in dict(results[0].point):
        curves = _curves(results, name)
        if curves:
            xs = [float(x) for series in curves for x in series.x]
            is_log = min(xs) > 0 and max(xs) >= 8 * min(xs)
            title = f"{_TITLES[metric].capitalize()} over {name}"
            ticks = sorted(set(xs)) if is_log and len(set(xs)) <= 8 else ()
            axes = (f"over_{name}", title, name, _TITLES[metric])
            charts.append(Chart(*axes, curves, x_log=is_log, x_ticks=ticks, y_format=y_format, note=note))
    return charts


def _curves(results: Sequence[Result], name: str) -> list[Series]:
    """A curve over one setting for each combination of the others. Empty if it is no number or there are too many."""
    groups: dict[Point, dict[float, Result]] = defaultdict(dict)
    for result in results:
        with suppress(ValueError):
            rest = tuple(item for item in result.point if item[0] != name)
            groups[rest][float(dict(result.point)[name])] = result
    longest = max((len(group) for group in groups.values()), default=0)
    if longest < 2 or len(groups) > _MOST_CURVES:
        return []
    curves = []
    for rest, group in groups.items():
        ordered = [group[x] for x in sorted(group)]
        label = ", ".join(f"{other} {value}" for other, value in rest) or name
        curves.append(_series(label, ordered, sorted(group), has_points=True))
    return curves


def _series(name: str, results: Sequence[Result], x: Sequence[float | str], *, has_points: bool = False) -> Series:
    """Means, with an interval where there are several runs."""
    lows = [None if r.deviation is None else r.mean - r.deviation for r in results]
    highs = [None if r.deviation is None else r.mean + r.deviation for r in results]
    means = [result.mean for result in results]
    if all(low is None for low in lows):
        return Series(name, means, x, has_points=has_points)
    return Series(name, means, x, low=lows, high=highs, has_points=has_points)


def _write_table(path: Path, spec: SweepSpec, cells: Sequence[Measured]) -> None:
    names = [name for name, _ in spec.points[0]]
    columns = ["run", *names, *_FIELDS, "images_per_second", "wall_seconds"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for found in cells:
        assert isinstance(found.cell, SweepCell)
        settings, metrics = dict(found.cell.settings), [getattr(found, field) for field in _FIELDS.values()]
        writer.writerow([found.run, *(settings[n] for n in names), *metrics, found.images_per_s, found.wall_s])
    write_atomically(path, text.getvalue())


def _write_page(
    folder: Path,
    spec: SweepSpec,
    results: Sequence[Result],
    metric: Metric,
    charts: Sequence[Chart],
    failed: Sequence[tuple[str, str]],
) -> None:
    names = [name for name, _ in spec.points[0] if name != SEED]
    rows = [
        [*(value for _, value in r.point), str(len(r.values)), _shown(r.values, metric), _shown(r.test_values)]
        for r in results
    ]
    table = Table([*names, "runs", _TITLES[metric], "test accuracy"], rows, caption="Mean ± standard deviation")
    best = results[0]
    spread = "one run"
    if best.deviation is not None:
        spread = f"± {_shown([best.deviation], metric)} over {len(best.values)} runs"
    tiles = [
        Tile(f"best {_TITLES[metric]}", _shown([best.mean], metric), spread),
        Tile("combinations", f"{len(results):,}", f"{sum(len(r.values) for r in results):,} runs"),
    ]
    if failed:
        tiles.append(Tile("failed", str(len(failed)), "cells", "bad"))
    flags = " ".join(spec.flags) or "none"
    blocks: list[Block] = [Tiles(tiles), *charts]
    sections = [
        Section("Results", blocks),
        Section("Combinations", [table]),
        Section("Failed cells", [Table(("cell", "why"), failed)] if failed else []),
        Section("Settings", [f"All cells: recipe `{spec.recipe}`, flags `{flags}`."]),
    ]
    write_page(
        folder / PAGE,
        f"Sweep of {spec.name}",
        [section for section in sections if section.blocks],
        subtitle=f"{len(spec.points)} runs",
        verdict=f"**Best: {best.words}**, {_TITLES[metric]} {_shown(best.values, metric)}.",
        tone="warn" if failed else "good",
        footer=f"Written by paceline {paceline.__version__} (`paceline sweep`).",
    )
