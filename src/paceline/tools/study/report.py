"""The output of a study: results.csv, the plots, and one page with the answers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.reports.charts import Chart, Series, Table
from paceline.reports.page import Block, Code, Details, Section, Tile, Tiles, write_page
from paceline.runs.folder import RunFolder
from paceline.runs.json_files import read_object
from paceline.tools.study.answers import SUSPECT, Answer, answer_all, in_one_sentence
from paceline.tools.study.collect import CSV_FILE, Measured, collect, write_csv
from paceline.tools.study.findings import Findings, Kind, Scaled, find
from paceline.tools.study.grid import BY_HAND, CELLS, StudySpec
from paceline.tools.study.model import TERMS, hold_out
from paceline.tools.study.plots import PLOTS, make_charts, write_plots
from paceline.tools.study.statistics import Estimate

PAGE = "report.html"
_TERM_WORDS = {
    "per_sample": ("work per sample", 1e6, "µs"),
    "fixed": ("work per step, for any batch", 1e3, "ms"),
    "entry": ("fixed cost of communication", 1e3, "ms"),
    "bandwidth": ("waiting that grows with the bytes moved", 1e3, "ms"),
    "latency": ("waiting per doubling of the ranks", 1e3, "ms"),
}


def write_report(
    folder: Path,
    spec: StudySpec,
    failed: Sequence[tuple[str, str]] = (),
    *,
    cells: list[Measured] | None = None,
    machine_of: Path | None = None,
) -> list[str]:
    """Write all output from the cells. Returns the lines to print.

    Runs that were started by hand are passed as `cells`, and one of their folders as `machine_of`.
    """
    cells = collect(folder, spec) if cells is None else cells
    write_csv(folder / CSV_FILE, cells)
    lines = [f"table     {os.path.relpath(folder / CSV_FILE)} ({len(cells)} rows)"]
    findings = find(cells)
    answers = answer_all(findings)
    charts = make_charts(findings)
    try:
        write_plots(folder, charts)
        lines.append(f"plots     {os.path.relpath(folder / PLOTS)}/ ({len(charts)}, each as PNG and SVG)")
    except UserError as error:
        lines.append(f"note      no plots as files: {error.hint}")
    machine = _machine([machine_of] if machine_of else [folder / CELLS / cell.name for cell in spec.cells()])
    path = write_study_page(folder / PAGE, spec, findings, cells, answers, charts, failed, machine=machine)
    lines.append(f"page      {os.path.relpath(path)}")
    return [*(f"answer    {answer.question} {_plain(answer.text)}" for answer in answers), *lines]


def write_study_page(
    path: Path,
    spec: StudySpec,
    findings: Findings,
    cells: Sequence[Measured],
    answers: Sequence[Answer],
    charts: Sequence[Chart],
    failed: Sequence[tuple[str, str]] = (),
    *,
    machine: dict[str, Any] | None = None,
) -> Path:
    sections = [
        Section("In short", [_tiles(findings, cells), *_answers(answers)], id="answers"),
        Section("How it scales", [chart for chart in charts if chart.kind != "stacked-bar"][:3], id="scaling"),
        Section("Why", [*[c for c in charts if c.kind == "stacked-bar"], *_table_of_kinds(findings)], id="why"),
        Section("Prediction for other sizes", _predictions(spec, findings, cells), id="prediction"),
        Section("Accuracy and memory", [c for c in charts if c.kind != "stacked-bar"][3:], id="results"),
        Section("Every cell", _every_cell(cells, failed), id="cells"),
        Section("How it was measured", _method(spec, cells, machine or {}), id="method"),
    ]
    sizes = ", ".join(map(str, sorted({kind.world_size for kind in findings.kinds})))
    names = " and ".join(strategy.upper() for strategy in findings.strategies)
    return write_page(
        path,
        f"Scaling study: {spec.name}",
        [section for section in sections if section.blocks],
        subtitle=f"{names} on {sizes} ranks, {len(cells)} runs",
        verdict=in_one_sentence(findings),
        tone="warn" if failed else "",
    )


def _plain(text: str) -> str:
    return text.replace("**", "").replace("`", "")


# --- Sections ---------------------------------------------------------------------------------------------------------


def _tiles(findings: Findings, cells: Sequence[Measured]) -> Tiles:
    best = max(findings.kinds, key=lambda kind: kind.images_per_s.value)
    tiles = [Tile("fastest", f"{best.images_per_s.value:,.0f} images/s", best.label)]
    if findings.scaled:
        widest = max(findings.scaled, key=lambda s: (s.kind.world_size, s.efficiency.value))
        tiles.append(Tile("speed-up", f"{widest.speedup.value:.2f}×", widest.kind.label))
        tiles.append(Tile("efficiency", widest.efficiency.show("{:.0%}").split(" (")[0], widest.kind.label))
    accuracy = best.accuracy
    if accuracy is not None:
        tiles.append(Tile("accuracy", f"{accuracy.value:.2%}", best.label))
    energy = [cell.energy_j for cell in cells if cell.energy_j is not None]
    if energy:
        tiles.append(Tile("energy", f"{sum(energy) / 3.6e6:.3f} kWh", "all runs together"))
    return Tiles(tiles)


def _answers(answers: Sequence[Answer]) -> list[Block]:
    return [f"**{answer.question}** {answer.text}" for answer in answers]


def _table_of_kinds(findings: Findings) -> list[Block]:
    scaled = {id(s.kind): s for s in findings.scaled}
    rows = []
    for kind in findings.kinds:
        compared = scaled.get(id(kind))
        rows.append(
            [
                kind.label,
                kind.cells[0].cell.global_batch_size,
                len(kind.cells),
                kind.epoch_s.show("{:.2f}"),
                kind.images_per_s.show("{:,.0f}"),
                *_step_columns(kind),
                compared.speedup.show("{:.2f}") if compared else None,
                _efficiency(compared) if compared else None,
                None if kind.peak_mb is None else round(kind.peak_mb),
                round(kind.cells[0].bytes_per_step / 1e6, 2),
            ]
        )
    columns = ["cell", "batch", "runs", "s per epoch", "images/s", "step p50 ms", "step p95 ms", "speed-up"]
    columns += ["efficiency", "peak MB", "MB sent per step"]
    return [Table(columns, rows, caption="Means over repeats, with their 95 % intervals in brackets.")]


def _efficiency(compared: Scaled) -> str:
    return compared.efficiency.show("{:.0%}") + (", suspect" if compared.efficiency.value > SUSPECT else "")


def _step_columns(kind: Kind) -> list[float | None]:
    columns: list[float | None] = []
    for values in ([c.step_p50_s for c in kind.cells], [c.step_p95_s for c in kind.cells]):
        known = [value for value in values if value is not None]
        columns.append(round(1000 * sum(known) / len(known), 2) if known else None)
    return columns


def _predictions(spec: StudySpec, findings: Findings, cells: Sequence[Measured]) -> list[Block]:
    """Powers of two beyond the measured sizes, at the study's global batch."""
    if not findings.models:
        return []
    widest = max(kind.world_size for kind in findings.kinds)
    batch = cells[0].cell.global_batch_size if cells else spec.global_batch_size
    sizes = [2**n for n in range(21) if 2**n <= min(batch, max(8 * widest, 8))]
    series: list[Series] = []
    for number, strategy in enumerate(findings.models):
        model = findings.models[strategy]
        said = [model.predict(size, batch / size) for size in sizes]
        speeds = [_inverse(p.step_s, batch) for p in said]
        measured = [kind for kind in findings.of(strategy) if kind.cells[0].cell.global_batch_size == batch]
        name = strategy.upper()
        series.append(
            Series(
                f"{name} model",
                [speed.value for speed in speeds],
                sizes,
                low=[speed.low for speed in speeds],
                high=[speed.high for speed in speeds],
                is_dashed=True,
                colour=number,
            )
        )
        points = [kind.cells[0].cell.global_batch_size / kind.step_s.value for kind in measured]
        series.append(
            Series(f"{name} measured", points, [k.world_size for k in measured], has_points=True, colour=number)
        )
    chart = Chart(
        "prediction",
        "Throughput beyond the cells",
        "ranks",
        "images per second",
        series,
        x_log=True,
        y_log=True,
        x_ticks=sizes,
        wide=True,
        note=f"At a global batch of {batch}, on ranks and a link like those measured. Bands are 95 %.",
    )
    return [chart, *_held_out(findings, cells), _coefficients(findings), _predict_hint(widest)]


def _predict_hint(widest: int) -> str:
    sizes = ",".join(str(widest * factor) for factor in (8, 32, 128))
    return (
        f"For other sizes, another network, the time of a whole training and its cost: "
        f"`paceline study predict STUDY --world-sizes {sizes} --link 100Gbit/s,2us --epochs 90`."
    )


def _inverse(step_s: Estimate, batch: float) -> Estimate:
    low = None if step_s.high is None else batch / step_s.high
    high = None if step_s.low is None else batch / max(step_s.low, 1e-9)
    return Estimate(batch / max(step_s.value, 1e-9), low, high)


def _held_out(findings: Findings, cells: Sequence[Measured]) -> list[Block]:
    parts = []
    for strategy in findings.models:
        held = hold_out(cells, strategy)
        if held is not None:
            cell, said, error = held
            truth = cell.step_s
            low, high = said.step_s.low or 0.0, said.step_s.high or 0.0
            inside = "inside" if low <= truth <= high else "**outside**"
            parts.append(
                f"A fit without the cells of {strategy.upper()} on {cell.cell.world_size} ranks predicts them with an "
                f"error of {error:+.1%}; the measured step is {inside} its interval."
            )
    if not parts:
        parts = ["To check the model against a size that is not in the fit, a study needs three world sizes or more."]
    return [" ".join(parts)]


def _coefficients(findings: Findings) -> Details:
    rows: list[list[str | float | int | None]] = []
    for strategy, model in findings.models.items():
        values: list[str | float | int | None] = [strategy.upper()]
        for term in TERMS:
            _, factor, unit = _TERM_WORDS[term]
            values.append(f"{factor * model.coefficients[term]:.3g} {unit}")
        rows.append([*values, f"{model.noise:.1%}"])
    columns = ["strategy", *(_TERM_WORDS[term][0] for term in TERMS), "noise of a run"]
    about = (
        "step = work per sample × samples of a rank + work per step, and on more than one rank + fixed cost "
        "+ bytes × 2(n-1)/n + latency × log2 n. Fitted by relative least squares; no term may be negative."
    )
    return Details("The model", [about, Table(columns, rows)])


def _every_cell(cells: Sequence[Measured], failed: Sequence[tuple[str, str]]) -> list[Block]:
    blocks: list[Block] = []
    if failed:
        blocks.append(Table(["not in the table", "why"], [[name, reason] for name, reason in failed]))
    rows: list[list[str | float | int | None]] = [
        [
            cell.cell.name,
            round(cell.epoch_s, 3),
            round(cell.images_per_s),
            round(1000 * cell.step_s, 2),
            None if cell.test_accuracy is None else f"{cell.test_accuracy:.2%}",
            None if cell.val_loss is None else round(cell.val_loss, 4),
            round(max(cell.peak_mb)) if cell.peak_mb else None,
            cell.attempts,
        ]
        for cell in cells
    ]
    columns = ["cell", "s per epoch", "images/s", "ms per step", "test accuracy", "val loss", "peak MB", "attempts"]
    blocks.append(Details(f"{len(cells)} runs", [Table(columns, rows)], is_open=len(cells) <= 16))
    restarted = [cell.cell.name for cell in cells if cell.attempts > 1]
    if restarted:
        blocks.append(f"Restarted during the run, timed after the last restart: {', '.join(restarted)}.")
    return blocks


def _method(spec: StudySpec, cells: Sequence[Measured], machine: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = [
        *_what_is_equal(spec, cells),
        "With several epochs, epoch times leave out the first one. Step times leave out the first ten steps. Time per "
        "step is a mean over ranks; memory is the highest peak of any rank. Throughput is all samples of an epoch "
        "divided by its time, logging included.",
    ]
    if machine:
        blocks.append(Table(["machine", ""], [[key, str(value)] for key, value in machine.items()]))
    if spec.place == BY_HAND:
        return blocks
    command = ["paceline", "study", spec.recipe, "--world-sizes", ",".join(map(str, spec.world_sizes))]
    command += ["--strategies", ",".join(spec.strategies), "--repeats", str(spec.repeats), "--scaling", spec.scaling]
    blocks.append(Code(shlex.join([*command, *spec.flags])))
    return blocks


def _what_is_equal(spec: StudySpec, cells: Sequence[Measured]) -> list[Block]:
    if spec.place == BY_HAND:
        named = Table(["cell", "run"], [[cell.cell.name, cell.run] for cell in cells])
        notes = f" Differences: {' | '.join(spec.stated)}." if spec.stated else ""
        text = (
            "These runs were started by hand. They have the same data, model, optimizer and loss, and precision "
            f"{_precisions(cells)}. Threads, other load and the time of day may differ.{notes}"
        )
        return [text, named]
    same = ["the recipe, the seed, the global batch and precision " + _precisions(cells), *spec.stated]
    return [
        "The same in every cell: " + "; ".join(same) + ". Cells run repeat by repeat, so a slow drift of the machine "
        "affects all cells equally."
    ]


def _precisions(cells: Sequence[Measured]) -> str:
    return " and ".join(sorted({cell.precision for cell in cells if cell.precision})) or "unknown"


def _machine(runs: Sequence[Path]) -> dict[str, Any]:
    """The machine of the first finished run."""
    for run in runs:
        found = read_object(RunFolder(run).environment)
        if found:
            return {key: value for key, value in found.items() if isinstance(value, str | int | float)}
    return {}
