"""The charts of a study, also as PNG and SVG files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.metrics.phases import STEP_PHASES
from paceline.reports.charts import Chart, Series
from paceline.settings.extras import how_to_install
from paceline.tools.study.findings import Findings, Kind
from paceline.tools.study.statistics import Estimate

_PHASE_NAMES = {"communication": "exposed communication", "data": "data wait"}
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
PLOTS = "plots"


def make_charts(findings: Findings) -> list[Chart]:
    """In the order of the page."""
    ticks = sorted({kind.world_size for kind in findings.kinds})
    axis: dict[str, Any] = {"x_label": "ranks", "x_log": True, "x_ticks": ticks}
    charts = [
        Chart(
            "plot_time_per_epoch",
            "Time per epoch",
            y_label="seconds",
            series=_curves(findings, lambda kind: kind.epoch_s, ideal=_ideal_time),
            y_log=True,
            note="Dashed: the time of one rank, divided by the ranks.",
            **axis,
        ),
        Chart(
            "plot_throughput",
            "Throughput",
            y_label="images per second",
            series=_curves(findings, lambda kind: kind.images_per_s, ideal=_ideal_speed),
            y_log=True,
            note="Dashed: one rank, times the ranks.",
            **axis,
        ),
        Chart(
            "plot_efficiency",
            "Efficiency",
            y_label="fraction of linear scaling",
            series=_efficiency(findings, ticks),
            y_from_zero=True,
            y_format="percent",
            note="Bars are 95 % intervals over repeats.",
            **axis,
        ),
        _breakdown(findings),
        _shares(findings),
        Chart(
            "plot_accuracy",
            "Accuracy",
            y_label="test accuracy",
            series=_curves(findings, lambda kind: kind.accuracy),
            y_format="percent",
            **axis,
        ),
        Chart(
            "plot_val_loss",
            "Validation loss",
            y_label="loss",
            series=_curves(findings, lambda kind: kind.val_loss),
            **axis,
        ),
        Chart(
            "plot_peak_mem_per_gpu",
            "Peak memory per rank",
            y_label="MB",
            series=_curves(findings, lambda kind: None if kind.peak_mb is None else Estimate(kind.peak_mb)),
            y_from_zero=True,
            note="The highest peak of any rank.",
            **axis,
        ),
    ]
    return [chart for chart in charts if chart.series]


def _curves(findings: Findings, value: Any, ideal: Any = None) -> list[Series]:
    series: list[Series] = []
    for scaling in findings.scalings:
        for number, strategy in enumerate(findings.strategies):
            kinds = [kind for kind in findings.of(strategy, scaling) if value(kind) is not None]
            if not kinds:
                continue
            name = _series_name(findings, strategy, scaling)
            estimates = [value(kind) for kind in kinds]
            colour = number + len(findings.strategies) * findings.scalings.index(scaling)
            series.append(_measured(name, kinds, estimates, colour))
            if ideal is not None and kinds[0].world_size == 1 and len(kinds) > 1:
                sizes = [kind.world_size for kind in kinds]
                points = [ideal(estimates[0].value, size, scaling) for size in sizes]
                series.append(Series(f"{name} ideal", points, sizes, is_dashed=True, colour=colour))
    return series


def _series_name(findings: Findings, strategy: str, scaling: str) -> str:
    return strategy.upper() + (f" {scaling}" if len(findings.scalings) > 1 else "")


def _measured(name: str, kinds: list[Kind], estimates: list[Estimate], colour: int) -> Series:
    has_interval = any(estimate.low is not None for estimate in estimates)
    return Series(
        name,
        [estimate.value for estimate in estimates],
        [kind.world_size for kind in kinds],
        low=[e.value if e.low is None else e.low for e in estimates] if has_interval else (),
        high=[e.value if e.high is None else e.high for e in estimates] if has_interval else (),
        has_points=True,
        colour=colour,
    )


def _ideal_time(one: float, size: int, scaling: str) -> float:
    # The epoch has the same samples in both kinds of scaling, so its time shrinks in both.
    return one / size


def _ideal_speed(one: float, size: int, scaling: str) -> float:
    return one * size


def _efficiency(findings: Findings, ticks: list[int]) -> list[Series]:
    series = []
    for scaling in findings.scalings:
        for number, strategy in enumerate(findings.strategies):
            rows = findings.scaled_of(strategy, scaling)
            if len(rows) > 1:
                colour = number + len(findings.strategies) * findings.scalings.index(scaling)
                name = _series_name(findings, strategy, scaling)
                series.append(_measured(name, [s.kind for s in rows], [s.efficiency for s in rows], colour))
    if series:
        series.append(Series("linear", [1.0 for _ in ticks], ticks, is_dashed=True, colour=len(_COLOURS) - 1))
    return series


def _breakdown(findings: Findings) -> Chart:
    kinds = [kind for kind in findings.kinds if kind.phases_s]
    labels = [kind.label for kind in kinds]
    series = []
    for number, phase in enumerate(STEP_PHASES):
        values = [1000 * (kind.phases_s[phase] or 0.0) for kind in kinds]
        if any(values):
            series.append(Series(_PHASE_NAMES.get(phase, phase), values, labels, colour=number))
    return Chart(
        "plot_step_breakdown",
        "Where a step's time goes",
        x_label="",
        y_label="milliseconds",
        series=series,
        kind="stacked-bar",
        y_from_zero=True,
        wide=True,
        note="Exposed communication is time that a rank waits for others. Overlapped communication is not included.",
    )


def _shares(findings: Findings) -> Chart:
    """The same bars as shares of the step: with many ranks, steps are too short to compare by length."""
    whole = _breakdown(findings)
    totals = [sum(values) for values in zip(*([y or 0.0 for y in series.y] for series in whole.series), strict=True)]
    shares = [
        replace(series, y=[(y or 0.0) / total for y, total in zip(series.y, totals, strict=True)])
        for series in whole.series
    ]
    return replace(
        whole,
        id="plot_step_shares",
        title="Shares of a step",
        y_label="of the step",
        series=shares,
        y_format="percent",
        note="",
    )


# --- As files ---------------------------------------------------------------------------------------------------------


def write_plots(folder: Path, charts: list[Chart]) -> list[Path]:
    """A PNG and an SVG of every chart. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "plots as files need matplotlib",
            hint=f"{how_to_install('study')}; report.html works without it",
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    (folder / PLOTS).mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in charts:
        figure, axes = pyplot.subplots(figsize=(7, 4.4), layout="constrained")
        draw = _draw_lines if chart.kind == "line" else _draw_bars
        draw(axes, chart)
        axes.set(title=chart.title, ylabel=chart.y_label, xlabel=chart.x_label)
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        for ending in ("png", "svg"):
            path = folder / PLOTS / f"{chart.id}.{ending}"
            # Without a date, the same numbers give the same file.
            figure.savefig(path, dpi=150, metadata={"Date": None} if ending == "svg" else None)
            paths.append(path)
        pyplot.close(figure)
    return paths


def _draw_lines(axes: Any, chart: Chart) -> None:
    for number, series in enumerate(chart.series):
        colour = _COLOURS[(number if series.colour is None else series.colour) % len(_COLOURS)]
        style: dict[str, Any] = {"color": colour, "linestyle": "--" if series.is_dashed else "-"}
        if series.low:
            below = [(y or 0.0) - (low or 0.0) for y, low in zip(series.y, series.low, strict=True)]
            above = [(high or 0.0) - (y or 0.0) for y, high in zip(series.y, series.high, strict=True)]
            axes.errorbar(series.x, series.y, yerr=[below, above], marker="o", capsize=3, label=series.name, **style)
        else:
            axes.plot(series.x, series.y, marker=None if series.is_dashed else "o", label=series.name, **style)
    if chart.x_log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(chart.x_ticks), [str(tick) for tick in chart.x_ticks])
        axes.minorticks_off()
    if chart.y_log:
        axes.set_yscale("log")
    if chart.y_from_zero:
        axes.set_ylim(bottom=0)
    _format_percent(axes, chart)
    axes.grid(alpha=0.3)


def _draw_bars(axes: Any, chart: Chart) -> None:
    if not chart.series:
        return
    labels = list(chart.series[0].x)
    bottom = [0.0] * len(labels)
    for number, series in enumerate(chart.series):
        values = [value or 0.0 for value in series.y]
        colour = _COLOURS[(number if series.colour is None else series.colour) % len(_COLOURS)]
        bars = axes.bar(labels, values, bottom=bottom, label=series.name, color=colour, width=0.65)
        if series.low:
            for bar, low, high in zip(bars, series.low, series.high, strict=True):
                if low is not None and high is not None:
                    middle = bar.get_x() + bar.get_width() / 2
                    axes.vlines(middle, low, high, color="#333333", linewidth=1.2)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    if len(labels) > 8:
        axes.tick_params(axis="x", rotation=60)
    _format_percent(axes, chart)
    axes.grid(axis="y", alpha=0.3)


def _format_percent(axes: Any, chart: Chart) -> None:
    if chart.y_format == "percent":
        from matplotlib.ticker import PercentFormatter

        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
