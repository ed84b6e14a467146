"""`paceline compare`: whether runs are bit-for-bit equal, or where they first differ."""

from __future__ import annotations

import json
import math
import string
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline.cli.command import Command
from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED, UserError
from paceline.metrics.recorder import read_rows
from paceline.reports.compare_page import Finding, write_compare_page
from paceline.runs.comparison import (
    SHORT_HASH,
    RunRecord,
    TextComparison,
    compare_records,
    config_differences,
    read_record,
)
from paceline.runs.find import find_run
from paceline.runs.folder import RunFolder, require_run_folder
from paceline.runs.notes import read_notes
from paceline.settings.declare import Arg

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


@dataclass(frozen=True)
class Verdict:
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


@dataclass(frozen=True)
class Compare:
    """Show whether runs are equal, or where each first differs from the first run. Exit code 0: equal, 1: different.

    Compared are weights, optimizer, losses of steps, metrics of epochs, and every tensor of their newest common
    checkpoint.
    """

    run: Annotated[tuple[str, ...], Arg(place="word", completes="run")]
    """Run folders, or their names in runs/."""
    json: bool = False
    """Print JSON."""
    html: Annotated[Path | None, Arg("PAGE.html", bare="compare.html", bare_unless=(".html", ".htm"))] = None
    """Also write a page with their curves (compare.html, unless another is given)."""


def compare(settings: Compare) -> int:
    page = settings.html
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        hint = "--html=FOLDER/PAGE.html, in an existing folder"
        raise UserError("the page cannot be written there", got=page, hint=hint)
    paths = _find_runs(settings.run)
    records = [read_record(path, read_rows(RunFolder(path).metrics_jsonl)) for path in paths]
    verdicts = [_judge(records[0], record, string.ascii_uppercase[n]) for n, record in enumerate(records[1:], 1)]
    if settings.json:
        print(json.dumps(_as_json(records, verdicts), indent=2))
    else:
        _print_tables(records)
        for verdict in verdicts:
            _print_verdict(verdict)
    if page is not None:
        _write_page(page, records, verdicts)
        print(f"\nthe page is {page}", file=sys.stderr if settings.json else sys.stdout)
    return EXIT_FINISHED if all(verdict.is_equal for verdict in verdicts) else EXIT_DIFFERENT


def _find_runs(names: tuple[str, ...]) -> list[Path]:
    paths = [find_run(name).path for name in names]
    most = len(string.ascii_uppercase)
    if not 2 <= len(paths) <= most:
        raise UserError("a comparison needs runs to compare", got=len(paths), allowed=f"2 to {most} run folders")
    for path in paths:
        require_run_folder(path)
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("one run is given twice", got=" ".join(names), hint="a run always equals itself")
    return paths


def _judge(first: RunRecord, other: RunRecord, label: str) -> Verdict:
    from paceline.checkpoints.difference import compare_newest  # opens tensors, so it needs torch

    pair = {"A": first, label: other}
    unfinished = [f"{name} has not finished ({record.status})" for name, record in pair.items() if not record.results]
    tensors = compare_newest(first.path, other.path)
    return Verdict(("A", label), compare_records(first, other), tensors, unfinished)


def _print_tables(records: list[RunRecord]) -> None:
    labels = list(string.ascii_uppercase[: len(records)])
    for label, record in zip(labels, records, strict=True):
        print(f"{label}  {record.path}  {read_notes(record.path)}".rstrip())
    differences = config_differences(records)
    if differences:
        _print_table("config", labels, {name: [_shown(v) for v in values] for name, values in differences.items()})
    else:
        print("\nconfig: the same")
    _print_table("results", labels, _result_rows(records))


def _result_rows(records: list[RunRecord]) -> dict[str, list[str]]:
    rows = {title: [_result(record, *spec) for record in records] for title, spec in _RESULTS.items()}
    return {title: cells for title, cells in rows.items() if set(cells) != {"-"}}


def _print_table(title: str, labels: list[str], rows: dict[str, list[str]]) -> None:
    lines = [[title, *labels], *(["  " + name, *cells] for name, cells in rows.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(labels) + 1)]
    print()
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


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


def _print_verdict(verdict: Verdict) -> None:
    finding = _in_words(verdict)
    print(f"\n{finding.sentence}")
    for line in finding.lines:
        print(f"  {line}")


def _in_words(verdict: Verdict) -> Finding:
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


def _write_page(page: Path, records: list[RunRecord], verdicts: list[Verdict]) -> None:
    try:
        write_compare_page(page, records, [_in_words(verdict) for verdict in verdicts], _result_rows(records))
    except OSError as error:
        raise UserError("the page cannot be written", where=str(page), got=error.strerror) from error


def _differences(verdict: Verdict) -> list[str]:
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


def _as_json(records: list[RunRecord], verdicts: list[Verdict]) -> dict[str, Any]:
    labels = string.ascii_uppercase
    names = [name for name, _ in _RESULTS.values()]
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


def _verdict_as_json(verdict: Verdict) -> dict[str, Any]:
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


COMMANDS = (Command("compare", Compare, compare),)
