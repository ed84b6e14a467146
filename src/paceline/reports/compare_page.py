"""A page that compares runs: curves, different settings, results, and whether the runs are equal."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.reports.charts import Chart, Series, Table
from paceline.reports.page import Block, Section, write_page
from paceline.reports.run_files import show_value
from paceline.runs.comparison import RunRecord, config_differences, logged_losses

Cells = Sequence[str | float | int | None]


@dataclass(frozen=True)
class Finding:
    """The result of comparing two runs: a sentence, and the differences."""

    is_equal: bool
    sentence: str
    lines: Sequence[str] = ()


def write_compare_page(
    path: Path, records: Sequence[RunRecord], findings: Sequence[Finding], results: dict[str, list[str]]
) -> Path:
    """`results` has a row per figure and a cell per run."""
    labels = list(string.ascii_uppercase[: len(records)])
    names = [f"{label} {record.path.resolve().name}" for label, record in zip(labels, records, strict=True)]
    is_equal = all(finding.is_equal for finding in findings)
    runs: list[Cells] = [
        [label, str(record.path), record.status] for label, record in zip(labels, records, strict=True)
    ]
    sections = [
        Section("Verdict", [*_findings(findings), Table(["run", "folder", "state"], runs)]),
        Section("Results", [Table(["", *labels], [[title, *cells] for title, cells in results.items()])]),
        Section("Curves", list(_charts(records, names))),
        Section("Settings", _settings(records, labels)),
    ]
    return write_page(
        path,
        f"{len(records)} runs compared",
        [section for section in sections if section.blocks],
        subtitle=", ".join(names),
        verdict="**Equal**, bit for bit, in everything that was compared."
        if is_equal
        else _describe_difference(findings),
        tone="good" if is_equal else "warn",
        footer=f"Written by paceline {paceline.__version__}.",
    )


def _describe_difference(findings: Sequence[Finding]) -> str:
    different = [finding for finding in findings if not finding.is_equal]
    more = f" ({len(different)} of {len(findings)} differ from the first)" if len(findings) > 1 else ""
    where = f" {different[0].sentence}, {different[0].lines[0]}." if different[0].lines else ""
    return f"**Not equal**{more}.{where}"


def _findings(findings: Sequence[Finding]) -> list[Block]:
    blocks: list[Block] = []
    for finding in findings:
        blocks.append(f"**{finding.sentence}**" + (":" if finding.lines else "."))
        blocks += [f"– {line}" for line in finding.lines]
    return blocks


def _settings(records: Sequence[RunRecord], labels: Sequence[str]) -> list[Block]:
    differences = config_differences(list(records))
    if not differences:
        return ["The settings are the same."]
    rows = [[name, *map(show_value, values)] for name, values in differences.items()]
    return [Table(["setting", *labels], rows, "Only settings that differ")]


def _charts(records: Sequence[RunRecord], names: Sequence[str]) -> list[Chart]:
    runs = list(zip(names, records, strict=True))
    charts = [
        Chart("loss", "Training loss", "step", "loss", _curves(runs, "step", "", "loss", "step"), wide=True),
        _difference(runs),
        Chart("val-loss", "Validation loss", "epoch", "loss", _curves(runs, "epoch", "val", "loss", "epoch")),
        Chart(
            *("val-accuracy", "Validation accuracy", "epoch", "accuracy"),
            _curves(runs, "epoch", "val", "accuracy", "epoch"),
            y_format="percent",
        ),
        *(_metric_chart(runs, name) for name in _chosen_metrics(records)),
        Chart(
            *("throughput", "Throughput of all ranks", "step", "images/s"),
            _curves(runs, "step", "", "throughput", "step"),
            y_from_zero=True,
        ),
    ]
    return [chart for chart in charts if chart.series]


def _chosen_metrics(records: Sequence[RunRecord]) -> list[str]:
    """What the best checkpoints were chosen by, beside accuracy and loss."""
    chosen = dict.fromkeys(record.results.get("best_by") for record in records)
    return [name for name in chosen if name not in (None, "accuracy", "loss")]


def _metric_chart(runs: list[tuple[str, RunRecord]], name: str) -> Chart:
    curves = _curves(runs, "epoch", "val", name, "epoch")
    return Chart(f"val-{name}", f"Validation {name}", "epoch", name, curves)


def _curves(runs: list[tuple[str, RunRecord]], kind: str, phase: str, key: str, x: str) -> list[Series]:
    curves = []
    for number, (name, record) in enumerate(runs):
        rows = [r for r in record.rows if r.get("kind") == kind and r.get("phase", "") == phase and key in r and x in r]
        if rows:
            values, places = [row[key] for row in rows], [row[x] for row in rows]
            curves.append(Series(name, values, places, has_points=kind == "epoch", colour=number))
    return curves


def _difference(runs: list[tuple[str, RunRecord]]) -> Chart:
    """The distance of each run's losses to those of the first run, at steps that both logged."""
    first = logged_losses(runs[0][1].rows)
    curves = []
    for number, (name, record) in enumerate(runs[1:], 1):
        other = logged_losses(record.rows)
        common = [interval for interval in first if interval in other]
        gaps = [abs(first[interval] - other[interval]) for interval in common]
        if any(gaps):
            curves.append(Series(name, gaps, [step for _, step in common], colour=number))
    title, note = f"Distance of the training loss to {runs[0][0]}", "Equal losses have no point."
    return Chart("distance", title, "step", "difference", curves, y_log=True, note=note)
