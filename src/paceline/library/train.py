"""`paceline.train(...)` and `paceline.plan(...)`: the commands of these names from Python."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoints.identity import refuse_early
from paceline.errors import CheckpointError, UserError
from paceline.launch.request import decide_processes, read_request
from paceline.library.child_run import train_in_child
from paceline.library.epochs import OnEpoch, check_on_epoch
from paceline.library.functions import is_of_notebook, reference_to, write_down
from paceline.library.run import Run
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace, claimed, decide_place
from paceline.runs.trust import trusting_code
from paceline.runtime.detect import read_rank_environment
from paceline.settings.fields import field_table, find_field, flatten
from paceline.settings.model_args import write_model_args
from paceline.settings.rules import check_faults, check_world
from paceline.settings.small_files import not_plain, write_plain
from paceline.settings.values import Setting, as_typed, check_texts, invalid, unknown_name

if TYPE_CHECKING:
    from paceline.training.plan import RunPlan

Function = Callable[..., Any]
NOTEBOOK_FILE = "functions.py"
_NAMES = {"model": "model_name", "data": "dataset", "loss": "loss", "metrics": "metrics"}


def train(
    recipe: str | Path = "shapes-cnn",
    *,
    model: str | Function | None = None,
    data: str | Function | None = None,
    loss: str | Function | None = None,
    metrics: str | Function | Sequence[str | Function] | None = None,
    output_dir: str | Path | None = None,
    quiet: bool = False,
    trust_code: bool = False,
    on_epoch: OnEpoch | None = None,
    **flags: Any,
) -> Run:
    """Train a recipe (shipped with Paceline, or a YAML file) and return the finished run.

    Every flag of `paceline train` is a keyword of the same name: `epochs=5`, `global_batch_size=512`, `processes=2`,
    `amp=False`, `model_args={"depth": 6}`. Ranks are separate processes, supervised, restarted and resumed as on the
    command line. Their output is printed, unless `quiet`.

    `model(num_classes, input_shape)` returns an nn.Module, `data(data_dir, seed)` the halves `(train, test)`,
    `loss(logits, labels)` the mean or a value per sample, and each of `metrics(logits, labels)` a value per sample.
    Each may be a name, `FILE.py:FUNCTION`, or the function itself. A function of a notebook is written, with everything
    it uses, to functions.py in the run folder.

    `on_epoch(epoch)` is called in this process after each epoch, with a `paceline.Epoch`. If it returns
    `paceline.STOP`, the run saves, tests and ends. If it raises, the run saves and stops, and the exception is raised.

    A mistake raises `paceline.errors.UserError` before anything starts. Use `trust_code` for a recipe that is another
    user's config.yaml: functions that it names are executed only with it.
    """
    with trusting_code(trust_code):
        _refuse_within_a_rank()
        check_on_epoch(on_epoch)
        given = {"model": model, "data": data, "loss": loss, "metrics": metrics}
        settings = _settings(given, flags) | {"output_dir": output_dir}
        typed_in = [function for name, function in _functions(settings) if is_of_notebook(function, where=name)]
        source = write_down(typed_in) if typed_in else ""
        with tempfile.TemporaryDirectory() as draft:  # a refused request leaves no file
            place = _check(recipe, settings, source, Path(draft) / NOTEBOOK_FILE)
        with claimed(place) as place:
            folder = place.folder
            file = folder.absolute() / NOTEBOOK_FILE
            before = None
            if source:
                before = _write_source(file, source)
                if not quiet:
                    print(f"code      {', '.join(f.__name__ for f in typed_in)} of this notebook, written to {file}")
            tokens = [token for setting in _as_settings(settings, file) for token in setting.tokens()]
            arguments = [str(recipe), *tokens, f"--output-dir={_place(output_dir, folder)}"]
            try:
                train_in_child(arguments, folder, quiet=quiet, on_epoch=on_epoch)
            except (UserError, CheckpointError):  # refused: the run in this folder keeps its code
                if before is not None:
                    write_plain(file, before)
                raise
        return Run(folder, trust_code=trust_code)


def plan(
    recipe: str | Path = "shapes-cnn",
    *,
    model: str | Function | None = None,
    data: str | Function | None = None,
    loss: str | Function | None = None,
    metrics: str | Function | Sequence[str | Function] | None = None,
    trust_code: bool = False,
    **flags: Any,
) -> RunPlan:
    """The numbers of a run before it is trained: `plan("shapes-cnn", epochs=5).total_steps`, like `paceline plan`.

    Takes the arguments of `train`, raises the same errors for mistakes, and starts and writes nothing.
    """
    with trusting_code(trust_code):
        settings = _settings({"model": model, "data": data, "loss": loss, "metrics": metrics}, flags)
        typed_in = [function for name, function in _functions(settings) if is_of_notebook(function, where=name)]
        with tempfile.TemporaryDirectory() as draft:
            file = Path(draft) / NOTEBOOK_FILE
            if typed_in:
                file.write_text(write_down(typed_in), encoding="utf-8")
            loaded = read_request(str(recipe), _as_settings(settings, file))
            world_size = decide_processes(loaded)
            check_world(loaded, world_size)
            from paceline.data.registry import describe_dataset
            from paceline.training.plan import make_plan

            info = describe_dataset(loaded.config.data, loaded.config.train.seed)
            return make_plan(loaded.config, info, world_size)


def _settings(given: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """The settings by the names of their flags. `model` and `model_name` may not both be given."""
    settings = {_NAMES[name]: value for name, value in given.items() if value is not None}
    twice = settings.keys() & {name for name, value in flags.items() if value is not None}
    if twice:
        keyword = next(name for name, field in _NAMES.items() if field in twice)
        raise UserError(f"{keyword} is given twice", where="paceline.train", got=f"{keyword} and {_NAMES[keyword]}")
    return settings | flags


def _write_source(file: Path, source: str) -> bytes | None:
    """Put the notebook's functions into the run folder. Returns what was there before.

    A run that is under way reads its functions again when it restarts: they stay as they are.
    """
    folder = RunFolder(file.parent)
    folder.refuse_if_owned()
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise not_plain(file)
    before = file.read_bytes() if file.exists() else None
    if before is not None and before != source.encode() and not folder.holds_a_run:
        raise UserError("this folder holds a functions.py that is no run's", where=str(file), hint="another output_dir")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_plain(file, source.encode())
    return before


def _check(recipe: str | Path, settings: dict[str, Any], source: str, file: Path) -> RunPlace:
    """Check everything that can be checked before the start."""
    if source:
        file.write_text(source, encoding="utf-8")
    loaded = read_request(str(recipe), _as_settings(settings, file))
    place = decide_place(loaded)
    check_world(loaded, decide_processes(loaded))
    check_faults(loaded, decide_processes(loaded))
    if place.resume_from is not None and not source:  # the draft has another name than the final file
        refuse_early(place.resume_from, flatten(loaded.config), prefer_best=loaded.config.run.best_is_latest)
    return place


def _place(output_dir: str | Path | None, folder: Path) -> str:
    """The URL of a store is passed on: the local folder is only a working copy."""
    return str(output_dir) if output_dir else str(folder)


def _refuse_within_a_rank() -> None:
    if read_rank_environment() is not None:
        raise UserError(
            "paceline.train starts ranks, but this process already is a rank",
            where="paceline.train",
            hint='put the call below `if __name__ == "__main__":`, because ranks import the file of your function; '
            "under torchrun or srun: torchrun -m paceline train RECIPE",
        )


def _functions(settings: dict[str, Any]) -> list[tuple[str, Function]]:
    """The function objects, with the names of their settings."""
    pairs = [(name, item) for name, value in settings.items() for item in _items(value)]
    return [(name, item) for name, item in pairs if callable(item)]


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _as_settings(keywords: dict[str, Any], notebook_file: Path) -> list[Setting]:
    """Keywords as settings: the same conversion and rules as for flags."""
    settings = []
    for key, given in keywords.items():
        where = f"paceline.train({key}=...)"
        field = find_field(key)
        if field is None:
            raise unknown_name(key, where, field_table())
        if given is None:
            continue
        is_mapping = isinstance(given, dict) and field.arg.is_mapping
        value = write_model_args(given, where) if is_mapping else given
        words = [
            reference_to(item, where=key, notebook_file=notebook_file) if callable(item) else item
            for item in _items(value)
        ]
        setting = check_texts(Setting(field, as_typed(words), "flag", where))
        is_list = isinstance(value, list | tuple)
        if isinstance(value, bool) != field.is_bool or (is_list and not field.is_tuple):
            raise invalid(setting, repr(value), "True or False" if field.is_bool else "")
        settings.append(setting)
    return settings
