"""Compare runs by the text files in their folders. Tensors are not opened here.

A step row has the mean loss since the previous row. So losses are compared interval by interval: two runs that log
at different steps are compared where their intervals agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.runs.folder import RunFolder, require_run_folder
from paceline.runs.json_files import RESULTS, read_object
from paceline.settings.load import load_config
from paceline.settings.schema import flatten

Row = dict[str, Any]
# Settings that do not change what a run computes.
_SILENT = ("output_dir", "resume", "load_policy", "track", "metric_lines", "async_save", "profile")
# Of an epoch's row: what is no metric. Rows of training also have times and sizes.
_NOT_METRICS = ("kind", "step", "epoch", "phase", "time", "throughput", "ranks", "seconds", "memory_peak_mb")
SHORT_HASH = 12  # characters of a hash that are shown
HASHES = ("weights_sha256", "optimizer_sha256")


@dataclass(frozen=True)
class RunRecord:
    """What a run folder records about its run."""

    path: Path
    config: dict[str, Any]
    results: dict[str, Any]  # empty for a run that did not finish
    status: str
    rows: list[Row]

    @property
    def is_finished(self) -> bool:
        return bool(self.results)


@dataclass(frozen=True)
class ValuePair:
    """One value of two runs, usually a difference."""

    what: str
    first: Any
    second: Any


@dataclass(frozen=True)
class TextComparison:
    """The comparison of two runs. None means no difference."""

    steps_compared: int
    first_step: ValuePair | None
    epoch_metrics_compared: int
    first_epoch_metric: ValuePair | None
    hashes: list[ValuePair]  # every hash that both have; only exact runs have an optimizer hash

    @property
    def other_hashes(self) -> list[ValuePair]:
        return [found for found in self.hashes if found.first != found.second]

    @property
    def is_equal(self) -> bool:
        return self.first_step is None and self.first_epoch_metric is None and not self.other_hashes


def read_record(path: Path, rows: list[Row]) -> RunRecord:
    """Read everything except the metrics. The caller passes them, because their layer is above this one."""
    require_run_folder(path)
    config = flatten(load_config(str(path / "config.yaml"), []).config)
    status = RunFolder(path).read_status()
    # If a finished run is resumed, its old results stay until it ends again.
    is_finished = status.get("status", "finished") == "finished"
    results = _read_results(RunFolder(path).results) if is_finished else {}
    state = "finished" if results else ": ".join(str(status[key]) for key in ("status", "reason") if key in status)
    return RunRecord(path, config, results, state or "not finished", rows)


def _read_results(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    results = read_object(path, RESULTS)
    if "weights_sha256" not in results:
        raise UserError("this run's results cannot be read", where=str(path), allowed="what paceline train wrote")
    return results


def config_differences(records: list[RunRecord]) -> dict[str, list[Any]]:
    """Settings that differ between runs, each with the values of all runs."""
    names = [name for name in records[0].config if name not in _SILENT]
    table = {name: [record.config[name] for record in records] for name in names}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


def compare_records(first: RunRecord, second: RunRecord) -> TextComparison:
    steps = _common(logged_losses(first.rows), logged_losses(second.rows))
    epochs = _common(_epoch_metrics(first.rows), _epoch_metrics(second.rows))
    return TextComparison(
        steps_compared=len(steps),
        first_step=_first_unequal({str(step): pair for (_, step), pair in steps.items()}),
        epoch_metrics_compared=len(epochs),
        first_epoch_metric=_first_unequal(epochs),
        hashes=[
            ValuePair(name, *both) for name, both in _common(first.results, second.results).items() if name in HASHES
        ],
    )


def logged_losses(rows: list[Row]) -> dict[tuple[int, int], float]:
    """The mean loss of each logged interval (last step before it, last step of it), in order."""
    losses, previous = {}, 0
    for row in rows:
        if row["kind"] == "step":
            losses[previous, row["step"]] = row["loss"]
            previous = row["step"]
    return losses


def largest_loss_difference(first: list[Row], second: list[Row]) -> float:
    """The largest difference between two loss curves; infinite if the runs logged different steps."""
    mine, other = logged_losses(first), logged_losses(second)
    if not mine or mine.keys() != other.keys():
        return float("inf")
    return max(abs(mine[interval] - other[interval]) for interval in mine)


def _epoch_metrics(rows: list[Row]) -> dict[str, float]:
    return {
        f"epoch {row['epoch']} {row['phase']} {name} (step {row['step']})": row[name]
        for row in rows
        if row["kind"] == "epoch"
        for name in row
        if name not in _NOT_METRICS
    }


def _common(first: dict[Any, Any], second: dict[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    return {key: (value, second[key]) for key, value in first.items() if key in second}


def _first_unequal(pairs: dict[str, tuple[Any, Any]]) -> ValuePair | None:
    return next((ValuePair(what, a, b) for what, (a, b) in pairs.items() if a != b), None)
