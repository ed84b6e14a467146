"""`paceline.cross_validate(...)`: a run per fold, and the mean and deviation of their metrics."""

from __future__ import annotations

import statistics
from math import nan
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.library.run import Run
from paceline.library.table import Table
from paceline.library.train import train
from paceline.runs.stores import is_url

_OF_VALIDATION = ("loss", "accuracy")
_SET_HERE = ("fold", "train_split")


def cross_validate(
    recipe: str | Path | None = None, *, folds: int = 5, output_dir: str | Path | None = None, **settings: Any
) -> CrossValidation:
    """Train a run for each fold, one after the other. Takes every argument of `train`.

    The validation sets of the runs are disjoint and cover the training set; the seed decides which sample is in which.
    Runs are in `output_dir/fold-1`, `fold-2`, ..., or each in its own folder in `runs/`. With `output_dir` and
    `resume="auto"`, the same call continues a cross-validation that was stopped.
    """
    taken = [name for name in _SET_HERE if settings.get(name) is not None]
    where = f"paceline.cross_validate({(taken or ['folds'])[0]}=...)"
    if taken:
        raise UserError("the folds decide this", where=where, got=settings[taken[0]], hint="leave it out")
    if isinstance(folds, bool) or not isinstance(folds, int) or not 2 <= folds <= 1000:
        raise UserError("folds is not valid", where=where, got=repr(folds), allowed="a whole number from 2 to 1000")
    runs = [
        train(recipe, folds=folds, fold=fold, output_dir=_folder(output_dir, fold), **settings)
        for fold in range(1, folds + 1)
    ]
    return CrossValidation(runs)


def _folder(output_dir: str | Path | None, fold: int) -> str | Path | None:
    if output_dir is None:
        return None
    return f"{output_dir}/fold-{fold}" if is_url(str(output_dir)) else Path(output_dir) / f"fold-{fold}"


class CrossValidation:
    """The runs of a cross-validation, in the order of their folds."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self._rows = [_metrics_of(run) for run in runs]

    @property
    def mean(self) -> dict[str, float]:
        """Of each metric over the folds: `mean["val_accuracy"]`."""
        return {name: statistics.fmean(values) for name, values in self._columns().items()}

    @property
    def deviation(self) -> dict[str, float]:
        """The standard deviation of each metric between the folds (divided by folds - 1)."""
        return {name: statistics.stdev(values) if len(values) > 1 else nan for name, values in self._columns().items()}

    @property
    def table(self) -> Table:
        """A row per fold, then the mean and the deviation."""
        rows = [{"fold": number, **row, "run": run.name} for number, (row, run) in enumerate(self._pairs(), 1)]
        return Table([*rows, {"fold": "mean", **self.mean}, {"fold": "deviation", **self.deviation}])

    def _pairs(self) -> list[tuple[dict[str, float], Run]]:
        return list(zip(self._rows, self.runs, strict=True))

    def _columns(self) -> dict[str, list[float]]:
        names = dict.fromkeys(name for row in self._rows for name in row)
        return {name: [row[name] for row in self._rows if name in row] for name in names}

    def __str__(self) -> str:
        return str(self.table)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For notebooks."""
        return self.table._repr_html_()


def _metrics_of(run: Run) -> dict[str, float]:
    """Of the best epoch on the run's validation set, and of its test. Empty for a run without results."""
    results = run.results
    if not results:
        return {}
    best = next((row for row in run.metrics("val") if row["epoch"] == results["best_epoch"]), {})
    names = [*_OF_VALIDATION, *results["test_metrics"]]
    validation = {f"val_{name}": best[name] for name in names if name in best}
    test = {name: results[f"test_{name}"] for name in _OF_VALIDATION} | results["test_metrics"]
    return {**validation, **{f"test_{name}": value for name, value in test.items() if value is not None}}
