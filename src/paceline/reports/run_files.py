"""Reads the plain files of a run folder. Every file may be missing: a run may have just started, or have failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.metrics.recorder import read_rows
from paceline.metrics.screen import format_flops, format_time
from paceline.reports.charts import Chart, Mark, Matrix, Series, Table
from paceline.reports.page import Block, Details, Tile
from paceline.runs.folder import RunFolder
from paceline.runs.json_files import (
    ENVIRONMENT,
    EXAMPLES,
    FAILURE,
    FAULT,
    RESULTS,
    STATUS,
    read_bounded,
    read_object,
    read_objects,
)
from paceline.settings.load import load_config
from paceline.settings.schema import field_table, flatten
from paceline.settings.tasks import METRICS

Row = dict[str, Any]
_PLACES = ("output_dir",)  # not a setting of the training
_MIB = 2**20
LARGEST_MATRIX = 60  # classes; with more only the most frequent mistakes are listed


@dataclass(frozen=True)
class RunFiles:
    folder: RunFolder
    state: str  # running, preempted, stopped, finished or failed; "unknown" without a status
    status: Row
    config: dict[str, Any]  # empty if it cannot be read
    config_text: str
    environment: Row
    results: Row  # empty for a run that did not finish
    rows: list[Row]
    failures: list[Row]
    faults: list[Row]
    examples: list[Row]

    @property
    def name(self) -> str:
        return self.folder.path.resolve().name

    @property
    def steps(self) -> list[Row]:
        return [row for row in self.rows if row.get("kind") == "step"]

    def epochs(self, phase: str) -> list[Row]:
        return [row for row in self.rows if row.get("kind") == "epoch" and row.get("phase") == phase]

    @property
    def own_metrics(self) -> list[str]:
        """Names of the user's own metrics, in rows and results: the FUNCTION of FILE.py:FUNCTION."""
        return [str(name).rpartition(":")[2] for name in self.config.get("metrics", ())]

    @property
    def shown_metrics(self) -> list[str]:
        """The metric that selects the best checkpoint, unless it is loss or accuracy, and the user's own."""
        chosen = str(self.config.get("best_by", "")).rpartition(":")[2]
        default = next(iter(METRICS.get(str(self.config.get("task")), {"": ""})))
        names = dict.fromkeys([chosen or default, *self.own_metrics])
        return [name for name in names if name not in ("", "loss", "accuracy")]

    @property
    def restarts(self) -> list[Row]:
        """Failures after which the run continued. The last failure of a failed run is not among them."""
        return self.failures[:-1] if self.state == "failed" else self.failures

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """Settings that differ from their default: (value, default)."""
        defaults = {name: spec.default for name, spec in field_table().items()}
        return {
            name: (value, defaults[name])
            for name, value in self.config.items()
            if value != defaults[name] and name not in _PLACES
        }


def read_run(path: Path, state: str = "") -> RunFiles:
    """`state`: the state that will be written to status.json, if it is not written yet."""
    folder = RunFolder(path)
    status = read_object(folder.status, STATUS)
    state = state or str(status.get("status", "unknown"))
    config_text = _read_text(folder.config)
    return RunFiles(
        folder=folder,
        state=state,
        status=status,
        config=_read_config(folder.config),
        config_text=config_text,
        environment=read_object(folder.environment, ENVIRONMENT),
        # A run that is resumed after its end keeps its old results until it ends again.
        results=read_object(folder.results, RESULTS) if state in ("finished", "unknown") else {},
        rows=read_rows(folder.metrics_jsonl),
        failures=read_objects(folder.failures, FAILURE),
        faults=read_objects(folder.faults, FAULT),
        examples=_read_examples(folder.examples) if state == "finished" else [],
    )


def show_value(value: object) -> str:
    """A setting as the user would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return " ".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) or "''"


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def _read_examples(path: Path) -> list[Row]:
    examples = read_object(path, EXAMPLES).get("examples", [])
    return [row for row in examples if row["picture"].startswith("data:image/")]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return flatten(load_config(str(path), []).config)
    except (PacelineError, OSError, SystemExit):  # a config of another version of paceline is shown as text
        return {}


# The curves of a run, from the rows of its metrics.jsonl.


def epoch_charts(run: RunFiles) -> list[Chart]:
    """Loss and accuracy by epoch; none for a run that ended in its first epoch."""
    phases = {"train": run.epochs("train"), "validation": run.epochs("val")}
    if not any(phases.values()):
        return []
    loss, accuracy = (
        [_series(name, rows, key, "epoch", has_points=True) for name, rows in phases.items() if _has(rows, key)]
        for key in ("loss", "accuracy")
    )
    charts = [Chart("epoch-loss", "Loss by epoch", "epoch", "loss", loss)]
    if accuracy:  # a regression has none
        charts.append(Chart("epoch-accuracy", "Accuracy by epoch", "epoch", "accuracy", accuracy, y_format="percent"))
    return [*charts, *_metric_charts(run)]


def _metric_charts(run: RunFiles) -> list[Chart]:
    """Charts of the user's own metrics and of the one that selects the best checkpoint, on the validation set."""
    rows = run.epochs("val")
    return [
        Chart(
            f"own-{name}",
            f"{name} by epoch",
            "epoch",
            name,
            [_series("validation", rows, name, "epoch", has_points=True)],
        )
        for name in run.shown_metrics
        if _has(rows, name)
    ]


def step_charts(run: RunFiles) -> list[Chart]:
    """The values logged during training."""
    rows = run.steps
    if not rows:
        return []
    marks = restart_marks(run)
    losses = [_series("train", rows, "loss")]
    if run.epochs("val"):
        losses.append(_series("validation", run.epochs("val"), "loss", has_points=True))
    note = "The training loss is the mean since the previous point."
    charts = [Chart("step-loss", "Loss by step", "step", "loss", losses, wide=True, marks=marks, note=note)]
    if _has(rows, "lr"):
        charts.append(Chart("lr", "Learning rate", "step", "learning rate", [_series("rate", rows, "lr")]))
    if _has(rows, "grad_norm"):
        norm = [_series("norm", rows, "grad_norm")]
        charts.append(Chart("grad-norm", "Gradient norm", "step", "norm over all ranks", norm))
    return charts


def speed_charts(run: RunFiles) -> list[Chart]:
    rows = run.steps
    charts = []
    if _has(rows, "throughput"):
        marks, speed = restart_marks(run), [_series("training", rows, "throughput")]
        title = "Throughput of all ranks"
        charts.append(Chart("throughput", title, "step", "images/s", speed, y_from_zero=True, marks=marks))
    if _has(rows, "memory_mb"):
        memory = [_in_bytes(_series(name, rows, key)) for name, key in _MEMORY.items() if _has(rows, key)]
        title = "Memory of the first rank"
        charts.append(Chart("memory", title, "step", "memory", memory, y_format="bytes", y_from_zero=True))
    if _has(rows, "data_wait"):
        wait = [_series("waiting", rows, "data_wait")]
        title, label = "Time spent waiting for data", "share of the time"
        charts.append(Chart("data-wait", title, "step", label, wait, y_format="percent", y_from_zero=True))
    return charts


_MEMORY = {"now": "memory_mb", "peak": "memory_peak_mb"}


def restart_marks(run: RunFiles) -> list[Mark]:
    return [
        Mark(float(row["step"]), f"rank {row.get('rank', '?')} failed")
        for row in run.failures
        if isinstance(row.get("step"), int)
    ]


def class_charts(run: RunFiles) -> list[Chart | Matrix]:
    """The confusion matrix, and the accuracy (precision, error) of each class."""
    charts: list[Chart | Matrix] = []
    test = run.results.get("test", {})
    accuracy = {str(name): value for name, value in test.get("class_accuracy", {}).items()}
    labels, matrix = list(accuracy), test.get("confusion_matrix", [])
    if matrix and len(matrix) == len(labels) <= LARGEST_MATRIX:
        charts.append(Matrix("confusion", "Confusion matrix", labels, matrix))
    if accuracy and len(accuracy) <= 2 * LARGEST_MATRIX:
        bars = [Series("test", list(accuracy.values()), labels)]
        title = "Accuracy by class"
        charts.append(Chart("classes", title, "class", "share recognised", bars, kind="bar", y_format="percent"))
    for name, title, label in _OTHER_TASKS:
        values = {str(key): value for key, value in test.get(name, {}).items()}
        if 1 < len(values) <= 2 * LARGEST_MATRIX:
            bars = [Series("test", list(values.values()), list(values))]
            charts.append(Chart("classes", title, label, title.partition(" by")[0].lower(), bars, kind="bar"))
    return charts


_OTHER_TASKS = (
    ("class_average_precision", "Average precision by label", "label"),
    ("class_mae", "Mean absolute error by number", "number"),
)


def mistakes(run: RunFiles, most: int = 10) -> list[tuple[str, str, int, float]]:
    """The most frequent mistakes: true class, predicted class, count, share of the true class."""
    test = run.results.get("test", {})
    labels, matrix = list(test.get("class_accuracy", {})), test.get("confusion_matrix", [])
    if len(matrix) != len(labels):
        return []
    found = [
        (labels[true], labels[taken], count, count / sum(row))
        for true, row in enumerate(matrix)
        for taken, count in enumerate(row)
        if count and true != taken
    ]
    return sorted(found, key=lambda mistake: -mistake[2])[:most]


def _has(rows: Sequence[Row], key: str) -> bool:
    return any(row.get(key) is not None for row in rows)


def _series(name: str, rows: Sequence[Row], key: str, x: str = "step", *, has_points: bool = False) -> Series:
    return Series(name, [row.get(key) for row in rows], [row[x] for row in rows], has_points=has_points)


def _in_bytes(series: Series) -> Series:
    return Series(series.name, [None if y is None else y * _MIB for y in series.y], series.x)


# The page section about device limits: how close a run came to them.


def limit_tile(run: RunFiles) -> Tile | None:
    limits = _limits(run)
    if limits.get("mfu") is None:
        return None
    done, ceiling = format_flops(limits["flops_per_s"]), format_flops(limits["ceiling_flops_per_s"])
    return Tile("of the matrix ceiling", f"{limits['mfu']:.0%}", f"{done} of {ceiling}")


def limit_blocks(run: RunFiles) -> list[Block]:
    """The verdict, its figures, and the operators of a profile."""
    limits = _limits(run)
    verdict = limits.get("verdict") or {}
    blocks: list[Block] = []
    if verdict:
        kind, text = str(verdict["kind"]), str(verdict["text"])
        blocks.append(f"**{kind}**{text.removeprefix(kind)}. Next: {verdict['try']}.")
    rows = [[name, value] for name, value in _figures(limits).items() if value is not None]
    if rows:
        steps = f"Limits, over {limits['steps']:,} steps of the last attempt"
        blocks.append(Table(["figure", "value"], rows, steps))
    return [*blocks, *_operators(run.results.get("profile"))]


def _limits(run: RunFiles) -> dict[str, Any]:
    found = run.results.get("limits")
    return found if isinstance(found, dict) else {}


def _figures(limits: dict[str, Any]) -> dict[str, str | None]:
    flops, done, ceiling = (limits.get(key) for key in ("flops_per_sample", "flops_per_s", "ceiling_flops_per_s"))
    ratio = limits.get("slowest_to_fastest")
    return {
        "operations per sample, forward and backward": f"{flops / 1e9:,.3g} GFLOP" if flops else None,
        "achieved, all ranks": format_flops(done) if done else None,
        f"matrix ceiling, all ranks, {limits.get('precision')}": format_flops(ceiling) if ceiling else None,
        "share of the ceiling (MFU)": _percent(limits.get("mfu")),
        "a step's time: waiting for data": _percent(limits.get("data_share")),
        "a step's time: exposed communication": _percent(limits.get("communication_share")),
        "a GPU's time: waiting for its host (while profiled)": _percent(limits.get("host_overhead_share")),
        "slowest rank against the fastest": f"{ratio:.2f} times the time" if ratio else None,
        "not known": str(limits["note"]) if limits.get("note") else None,
    }


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _operators(profile: Any) -> list[Block]:
    if not isinstance(profile, dict) or not profile.get("top"):
        return []
    rows: list[list[str | float | int | None]] = [
        [entry["name"], format_time(entry["seconds"]), f"{entry['share']:.0%}", entry["calls"]]
        for entry in profile["top"]
    ]
    table = Table(["operator", "self time", "share", "calls"], rows)
    where = f"traces of every rank are in `{profile['folder']}/`, for ui.perfetto.dev"
    return [Details(f"The most expensive operators of {profile['steps']} steps", [table, f"Of rank 0; {where}."])]
