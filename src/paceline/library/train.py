"""`paceline.train(...)` and `paceline.plan(...)`: the commands of these names from Python."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import CheckpointError, UserError
from paceline.library.call import Call, check_call, find_objects, read_call
from paceline.library.child_run import train_in_child
from paceline.library.epochs import OnEpoch, check_on_epoch
from paceline.library.functions import name_of
from paceline.library.run import Run
from paceline.library.run_inputs import RunInputs
from paceline.runs.place import RunPlace, claimed
from paceline.runs.trust import trusting_code
from paceline.runtime.detect import read_rank_environment

if TYPE_CHECKING:
    from torch import nn

    from paceline.training.plan import RunPlan

Function = Callable[..., Any]


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
            except BaseException:  # also Ctrl-C: nothing has started
                inputs.undo()
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
    if read_rank_environment() is not None:
        raise UserError(
            "paceline.train starts ranks, but this process already is a rank",
            where="paceline.train",
            hint='put the call below `if __name__ == "__main__":`, because ranks import the file of your function; '
            "under torchrun or srun: torchrun -m paceline train RECIPE",
        )
