"""`paceline.compare(...)`: whether runs are bit-for-bit equal, or where they first differ."""

from __future__ import annotations

import html
import math
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UserError
from paceline.library.run import Run
from paceline.library.table import Table
from paceline.metrics.recorder import read_rows
from paceline.reports.compare_page import Finding, write_compare_page
from paceline.runs.catalog import find_run
from paceline.runs.comparison import (
    HASHES,
    SHORT_HASH,
    RunRecord,
    TextComparison,
    compare_records,
    config_differences,
    read_record,
)
from paceline.runs.folder import RunFolder, require_run_folder
from paceline.runs.notes import read_notes

if TYPE_CHECKING:
    from paceline.checkpoints.difference import CheckpointComparison

_RESULTS = {
    "test accuracy": ("test_accuracy", "{:.2%}"),
    "test loss": ("test_loss", "{:.6f}"),
    "steps": ("steps", "{:,}"),
    "samples/s": ("samples_per_second", "{:,.0f}"),
    "of the matrix ceiling": ("limits.mfu", "{:.0%}"),
    "limit": ("limits.verdict.kind", "{}"),
    "world size": ("world_size", "{}"),
    "strategy": ("strategy", "{}"),
    "weights": ("weights_sha256", f"{{:.{SHORT_HASH}}}"),
    "optimizer": ("optimizer_sha256", f"{{:.{SHORT_HASH}}}"),
}

_IN_RESULTS = ("accuracy", "loss")  # in _RESULTS already


def compare(runs: Sequence[Run | str | Path]) -> Comparison:
    """Compare two or more runs with the first of them: runs, run folders, or names in `runs/`.

    Compared are weights, optimizer, losses of steps, metrics of epochs, and every tensor of the newest common
    checkpoint.
    """
    if isinstance(runs, str | Path | Run):
        hint = "paceline.compare([first, second])"
        raise UserError("a comparison needs a list of runs", where="paceline.compare", got=repr(runs), hint=hint)
    paths = _find_runs([str(run.path if isinstance(run, Run) else run) for run in runs])
    records = [read_record(path, read_rows(RunFolder(path).metrics_jsonl)) for path in paths]
    others = list(zip(records, string.ascii_uppercase, strict=False))[1:]
    return Comparison(records, [_judge(records[0], record, label) for record, label in others])


@dataclass(frozen=True)
class RunPair:
    """A run compared with the first one."""

    labels: tuple[str, str]
    text: TextComparison
    tensors: CheckpointComparison | None
    unfinished: list[str]

    @property
    def is_equal(self) -> bool:
        """A run without a final hash is not equal to another."""
        has_other_tensor = self.tensors is not None and self.tensors.difference is not None
        return self.text.is_equal and not has_other_tensor and not self.unfinished


class Comparison:
    """Runs compared with the first of them. `print` shows it all; `table` has the figures."""

    def __init__(self, records: list[RunRecord], verdicts: list[RunPair]) -> None:
        self._records = records
        self.verdicts = verdicts  # of every run but the first
        self._labels = list(string.ascii_uppercase[: len(records)])

    @property
    def is_equal(self) -> bool:
        """Whether all runs are finished and equal, bit for bit."""
        return all(verdict.is_equal for verdict in self.verdicts)

    @property
    def table(self) -> Table:
        """A row per run: the settings that differ, and its results."""
        differences = config_differences(self._records)
        names = [name for name, _ in _results_of(self._records).values()]
        rows = [
            {
                "run": record.path.name,
                **{name: values[number] for name, values in differences.items()},
                **{name: _short(name, _find(record.results, name)) for name in names},
            }
            for number, record in enumerate(self._records)
        ]
        known = {name for row in rows for name, value in row.items() if value is not None}
        return Table({name: value for name, value in row.items() if name in known} for row in rows)

    @property
    def findings(self) -> list[str]:
        """A sentence for every run but the first, and the lines about its differences."""
        return [line for verdict in self.verdicts for line in _lines(_in_words(verdict))]

    def to_json(self) -> dict[str, Any]:
        return _as_json(self._records, self.verdicts)

    def write_page(self, page: Path) -> None:
        """Write an HTML page with the curves of the runs."""
        findings = [_in_words(verdict) for verdict in self.verdicts]
        try:
            write_compare_page(page, self._records, findings, _result_rows(self._records))
        except OSError as error:
            raise UserError("the page cannot be written", where=str(page), got=error.strerror) from error

    def __str__(self) -> str:
        lines = [
            f"{label}  {record.path}  {read_notes(record.path)}".rstrip()
            for label, record in zip(self._labels, self._records, strict=True)
        ]
        lines += self._config_lines() + _table_lines("results", self._labels, _result_rows(self._records))
        for verdict in self.verdicts:
            lines += ["", *_lines(_in_words(verdict))]
        return "\n".join(lines)

    def _config_lines(self) -> list[str]:
        differences = config_differences(self._records)
        if not differences:
            return ["", "config: the same"]
        rows = {name: [_shown(value) for value in values] for name, values in differences.items()}
        return _table_lines("config", self._labels, rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks."""
        findings = "".join(f"<li>{html.escape(line)}</li>" for line in self.findings)
        return f"{self.table._repr_html_()}<ul>{findings}</ul>"


def _short(name: str, value: Any) -> Any:
    return value[:SHORT_HASH] if name in HASHES and value is not None else value


def _lines(finding: Finding) -> list[str]:
    return [finding.sentence, *(f"  {line}" for line in finding.lines)]


def _table_lines(title: str, labels: list[str], rows: dict[str, list[str]]) -> list[str]:
    lines = [[title, *labels], *(["  " + name, *cells] for name, cells in rows.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(labels) + 1)]
    cells = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return ["", *("  ".join(line).rstrip() for line in cells)]


def _find_runs(names: Sequence[str]) -> list[Path]:
    paths = [find_run(name).path for name in names]
    most = len(string.ascii_uppercase)
    if not 2 <= len(paths) <= most:
        raise UserError("a comparison needs runs to compare", got=len(paths), allowed=f"2 to {most} run folders")
    for path in paths:
        require_run_folder(path)
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("one run is given twice", got=" ".join(names), hint="a run always equals itself")
    return paths


def _judge(first: RunRecord, other: RunRecord, label: str) -> RunPair:
    from paceline.checkpoints.difference import compare_newest  # opens tensors, so it needs torch

    pair = {"A": first, label: other}
    unfinished = [f"{name} has not finished ({record.status})" for name, record in pair.items() if not record.results]
    tensors = compare_newest(first.path, other.path)
    return RunPair(("A", label), compare_records(first, other), tensors, unfinished)


def _result_rows(records: list[RunRecord]) -> dict[str, list[str]]:
    rows = {title: [_result(record, *spec) for record in records] for title, spec in _results_of(records).items()}
    return {title: cells for title, cells in rows.items() if set(cells) != {"-"}}


def _results_of(records: list[RunRecord]) -> dict[str, tuple[str, str]]:
    """The figures to compare: the metrics that chose the best checkpoints, and those that every run has."""
    chosen = dict.fromkeys(record.results.get("best_by") for record in records)
    own = {f"test {name}": (f"test_metrics.{name}", "{:.6g}") for name in chosen if name not in (None, *_IN_RESULTS)}
    return own | _RESULTS


def _shown(value: object) -> str:
    return " ".join(value) or "none" if isinstance(value, tuple) else str(value) or "''"


def _result(record: RunRecord, name: str, form: str) -> str:
    value = _find(record.results, name)
    return "-" if value is None else form.format(value)


def _find(results: Any, name: str) -> Any:
    """`limits.mfu` is the `mfu` of the `limits`; None where one of them is missing."""
    for part in name.split("."):
        results = results.get(part) if isinstance(results, dict) else None
    return results


def _in_words(verdict: RunPair) -> Finding:
    a, b = verdict.labels
    text, tensors = verdict.text, verdict.tensors
    seen = f"{text.steps_compared} logged losses, {text.epoch_metrics_compared} epoch metrics"
    if tensors is None:
        tensor_words = "they have no checkpoint of the same step"
    else:
        tensor_words = f"{tensors.tensors_compared} tensors of the checkpoints of step {tensors.step}"
    if verdict.is_equal:
        hashes = " and ".join(found.what.removesuffix("_sha256") for found in text.hashes)
        return Finding(True, f"{a} and {b} are equal: final {hashes}, {seen}; {tensor_words}")
    lines = [*verdict.unfinished, *_differences(verdict)]
    if text.first_step is None:
        lines.append(f"the same: {text.steps_compared} logged losses")
    if tensors is None:
        lines.append(tensor_words)
    elif tensors.difference is None:
        lines.append(f"the same: {tensor_words}")
    return Finding(False, f"{a} and {b} differ", lines)


def _differences(verdict: RunPair) -> list[str]:
    a, b = verdict.labels
    text, tensors = verdict.text, verdict.tensors
    lines = []
    if text.first_step is not None:
        step = text.first_step
        lines.append(f"first at step {step.what}: loss {step.first!r} in {a}, {step.second!r} in {b}")
    if text.first_epoch_metric is not None:
        metric = text.first_epoch_metric
        lines.append(f"first epoch metric: {metric.what}: {metric.first!r} in {a}, {metric.second!r} in {b}")
    for found in text.other_hashes:
        lines.append(f"{found.what}: {found.first[:SHORT_HASH]} in {a}, {found.second[:SHORT_HASH]} in {b}")
    if tensors is not None and tensors.difference is not None:
        lines.append(f"first tensor at step {tensors.step}: {tensors.difference}")
    return lines


def _as_json(records: list[RunRecord], verdicts: list[RunPair]) -> dict[str, Any]:
    labels = string.ascii_uppercase
    names = [name for name, _ in _results_of(records).values()]
    return {
        "equal": all(verdict.is_equal for verdict in verdicts),
        "runs": [
            {
                "label": label,
                "path": str(record.path),
                "status": record.status,
                **asdict(read_notes(record.path)),
                "results": {
                    name: _find(record.results, name) for name in names if _find(record.results, name) is not None
                },
            }
            for label, record in zip(labels, records, strict=False)
        ],
        "config_differences": {
            name: dict(zip(labels, values, strict=False)) for name, values in config_differences(records).items()
        },
        "comparisons": [_verdict_as_json(verdict) for verdict in verdicts],
    }


def _verdict_as_json(verdict: RunPair) -> dict[str, Any]:
    a, b = verdict.labels
    text, tensors = verdict.text, verdict.tensors
    step, metric = text.first_step, text.first_epoch_metric
    difference = tensors.difference if tensors is not None else None
    return {
        "runs": [a, b],
        "equal": verdict.is_equal,
        "unfinished": verdict.unfinished,
        "steps_compared": text.steps_compared,
        "first_step": {"step": int(step.what), "loss": {a: step.first, b: step.second}} if step else None,
        "epoch_metrics_compared": text.epoch_metrics_compared,
        "first_epoch_metric": {"metric": metric.what, a: metric.first, b: metric.second} if metric else None,
        "same_hashes": {found.what: found.first == found.second for found in text.hashes},
        "checkpoint_step": tensors.step if tensors is not None else None,
        "tensors_compared": tensors.tensors_compared if tensors is not None else 0,
        "first_tensor": {
            "kind": difference.kind,
            "name": difference.name,
            "words": difference.text,
            # JSON knows no infinity; the words do.
            "largest": difference.largest if math.isfinite(difference.largest or 0.0) else None,
            "index": list(difference.index) if difference.index is not None else None,
        }
        if difference is not None
        else None,
    }
