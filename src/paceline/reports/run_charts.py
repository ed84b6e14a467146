"""The curves of a run, from the rows of its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.reports.charts import Chart, Mark, Matrix, Series
from paceline.reports.run_files import Row, RunFiles

_MIB = 2**20
LARGEST_MATRIX = 60  # classes; with more only the most frequent mistakes are listed


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
