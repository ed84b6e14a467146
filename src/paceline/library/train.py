"""`paceline.train(...)` and `paceline.plan(...)`: the commands of these names from Python."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, UserError
from paceline.library.call import Call, check_call, find_objects, read_call
from paceline.library.child_run import train_in_child
from paceline.library.epochs import OnEpoch, check_on_epoch
from paceline.library.functions import name_of
from paceline.library.run import Run
from paceline.library.run_inputs import RunInputs
from paceline.library.table import Table
from paceline.runs.folder import unwritable_folder
from paceline.runs.local_code import refuse_while_importing
from paceline.runs.place import RunPlace, claimed
from paceline.runs.stores import is_url
from paceline.runs.trust import trusting_code
from paceline.runtime.detect import read_rank_environment

if TYPE_CHECKING:
    from torch import nn

    from paceline.training.plan import RunPlan


Function = Callable[..., Any]
_OF_VALIDATION = ("loss", "accuracy")
_SET_HERE = ("fold", "train_split")


def train(
    recipe: str | Path | None = None,
    *,
    model: str | Function | nn.Module | None = None,
    data: Any = None,
    validation: Any = None,
    test: Any = None,
    classes: Sequence[str] | int | None = None,
    transform: Function | None = None,
    loss: str | Function | None = None,
    metrics: str | Function | Sequence[str | Function] | None = None,
    name: str | None = None,
    output_dir: str | Path | None = None,
    quiet: bool = False,
    trust_code: bool = False,
    on_epoch: OnEpoch | None = None,
    **flags: Any,
) -> Run:
    """Train a model, or a recipe (shipped with Paceline, or a YAML file), and return the finished run.

    Every flag of `paceline train` is a keyword of the same name: `epochs=5`, `global_batch_size=512`, `processes=2`,
    `amp=False`, `model_args={"depth": 6}`. Ranks are separate processes, supervised, restarted and resumed as on the
    command line. Their output is printed, unless `quiet`. Without a recipe, all settings have their defaults, which
    `paceline train --help` lists (if neither model nor data is given: the recipe shapes-cnn).

    `data` is a pair of arrays or tensors (x, y), a map-style data set, a name, or a function. `validation` and `test`
    are other pairs or data sets; without them, samples are held out of `data`. `classes` names the classes.
    `transform` is applied to each sample once, before the training. `model` is an nn.Module, a name, or a function
    `(num_classes, input_shape)` that returns an nn.Module. `loss(logits, labels)` returns the mean or a value per
    sample, and each of `metrics(logits, labels)` a value per sample. A function may also be `FILE.py:FUNCTION`.

    The run folder is `runs/NAME-TIME`. The name is `name`, else that of the recipe, else that of the model.

    `on_epoch(epoch)` is called in this process after each epoch, with a `paceline.Epoch`. If it returns
    `paceline.STOP`, the run saves, tests and ends. If it raises, the run saves and stops, and the exception is raised.

    A mistake raises `paceline.errors.UserError` before anything starts. Use `trust_code` for a recipe that is another
    user's config.yaml: functions that it names are executed only with it.
    """
    # The folder exists until the run has ended: ranks read the recipe again when they restart.
    with trusting_code(trust_code), tempfile.TemporaryDirectory() as draft:
        _refuse_within_a_rank()
        check_on_epoch(on_epoch)
        given = {"model": model, "data": data, "loss": loss, "metrics": metrics, "output_dir": output_dir}
        call = read_call(recipe, given, flags, name, Path(draft))
        call = find_objects(call, validation=validation, test=test, classes=classes, transform=transform)
        with claimed(check_call(call, Path(draft))) as place:
            inputs = RunInputs(place.folder)
            try:
                arguments = _write_inputs(call, place, inputs, is_quiet=quiet)
            except BaseException as error:  # also Ctrl-C: nothing has started
                inputs.undo()
                if isinstance(error, OSError):
                    raise unwritable_folder(place.folder, error) from error
                raise
            try:
                train_in_child(arguments, place.folder, quiet=quiet, on_epoch=on_epoch)
            except (UserError, CheckpointError):
                inputs.undo()
                raise
        return Run(place.folder, trust_code=trust_code)


def plan(
    recipe: str | Path | None = None,
    *,
    model: str | Function | nn.Module | None = None,
    data: Any = None,
    validation: Any = None,
    test: Any = None,
    classes: Sequence[str] | int | None = None,
    transform: Function | None = None,
    loss: str | Function | None = None,
    metrics: str | Function | Sequence[str | Function] | None = None,
    trust_code: bool = False,
    **flags: Any,
) -> RunPlan:
    """The numbers of a run before it is trained: `plan("shapes-cnn", epochs=5).total_steps`, like `paceline plan`.

    Takes the arguments of `train`, raises the same errors for mistakes, and starts and writes nothing.
    """
    with trusting_code(trust_code), tempfile.TemporaryDirectory() as draft:
        given = {"model": model, "data": data, "loss": loss, "metrics": metrics}
        call = read_call(recipe, given, flags, None, Path(draft))
        call = find_objects(call, validation=validation, test=test, classes=classes, transform=transform)
        return call.plan(Path(draft))


def _write_inputs(call: Call, place: RunPlace, inputs: RunInputs, *, is_quiet: bool) -> list[str]:
    """Write what the ranks need into the run folder. Returns the arguments of `paceline train`."""
    settings = dict(call.settings)
    lines = []
    source_file = place.folder.absolute() / "functions.py"
    if call.source:
        source_file = inputs.write_source(call.source)
        names = ", ".join(name_of(function) for function in call.written)
        lines.append(f"code      {names}, written to {source_file}")
    if call.objects is not None:
        call.objects.require_space(place.folder)
        arrays = inputs.write_arrays(call.objects)
        settings["data_dir"] = str(arrays)
        lines.append(f"arrays    {call.objects.size_bytes / 1e6:,.1f} MB in {arrays}")
    if call.instance is not None and place.resume_from is None:
        settings["init_from"] = str(inputs.write_weights(call.instance))
    if not is_quiet and lines:
        print("\n".join(lines))
    tokens = [token for setting in call.as_settings(source_file, settings) for token in setting.tokens()]
    # The URL of a store is passed on: the local folder is only a working copy.
    return [call.recipe, *tokens, f"--output-dir={settings.get('output_dir') or place.folder}"]


def _refuse_within_a_rank() -> None:
    refuse_while_importing("paceline.train is called by a file that is being imported for its functions")
    if read_rank_environment() is not None:
        raise UserError(
            "paceline.train starts ranks, but this process already is a rank",
            where="paceline.train",
            hint='put the call below `if __name__ == "__main__":`, because ranks import the file of your function; '
            "under torchrun or srun: torchrun -m paceline train RECIPE",
        )


# `paceline.cross_validate(...)`: a run per fold, and the mean and deviation of their metrics.


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
