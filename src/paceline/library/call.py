"""One call of `paceline.train` or `paceline.plan`: its settings, its functions and its objects, all of them checked."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.checkpoints.identity import refuse_early
from paceline.data.array_folder import ARRAYS
from paceline.errors import UserError
from paceline.launch.request import decide_processes, read_request
from paceline.library.functions import is_importable, name_of, reference_to, write_down
from paceline.library.modules import check_module, is_module
from paceline.library.run_inputs import SOURCE_FILE
from paceline.runs.place import RunPlace, decide_place, propose_run_folder
from paceline.settings.load import LoadedConfig, load_config, to_yaml
from paceline.settings.recipe_file import DEFAULT_RECIPE
from paceline.settings.rules import check_faults, check_world
from paceline.settings.schema import Config, ModelConfig, field_table, find_field, flatten
from paceline.settings.syntax import write_model_args
from paceline.settings.values import Setting, as_typed, check_texts, invalid, unknown_name

if TYPE_CHECKING:
    from torch import nn

    from paceline.library.data_objects import DataObjects
    from paceline.training.plan import RunPlan

_NAMES = {"model": "model_name", "data": "dataset", "loss": "loss", "metrics": "metrics"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_RESERVED = "config"  # config.yaml is the resolved config in a run folder


@dataclass(frozen=True)
class Call:
    recipe: str
    settings: dict[str, Any]  # by the names of flags; values may be functions
    name: str  # of the run; empty: that of the recipe
    source: str = ""  # of functions.py
    written: tuple[Any, ...] = ()  # the functions in it
    objects: DataObjects | None = None
    instance: nn.Module | None = None

    def as_settings(self, source_file: Path, settings: dict[str, Any] | None = None) -> list[Setting]:
        return as_settings(self.settings if settings is None else settings, source_file)

    def plan(self, draft: Path) -> RunPlan:
        """The numbers of the run. Nothing is written but drafts."""
        from paceline.data.registry import describe_dataset, forget_data
        from paceline.training.plan import make_plan

        loaded = self.load(draft)
        world_size = decide_processes(loaded)
        check_world(loaded, world_size)
        if self.objects is not None:
            return make_plan(loaded.config, self.objects.data.info, world_size)
        try:
            return make_plan(loaded.config, describe_dataset(loaded.config.data, loaded.config.train.seed), world_size)
        finally:
            forget_data()  # the caller may change it before the next call

    def load(self, draft: Path) -> LoadedConfig:
        """The resolved and checked config, with drafts in place of the files of the run folder."""
        file, settings = draft / SOURCE_FILE, dict(self.settings)
        if self.source:
            file.write_text(self.source, encoding="utf-8")
        if self.objects is not None:
            from paceline.data.sources.arrays import write_header

            settings["data_dir"] = str(draft)
            write_header(draft, self.objects.header)
        return read_request(self.recipe, as_settings(settings, file))


def read_call(
    recipe: str | Path | None, given: dict[str, Any], flags: dict[str, Any], name: str | None, draft: Path
) -> Call:
    """Sort the arguments. Without a recipe, one with the defaults of all settings is written to `draft`."""
    settings = _settings(given, flags)
    if name is not None and (not _NAME.fullmatch(name) or name == _RESERVED):
        raise UserError(
            "this cannot be the name of a run",
            where="paceline.train(name=...)",
            got=repr(name),
            allowed=f"letters, digits, dots, hyphens and underscores, at most 100, not {_RESERVED!r}",
        )
    if recipe is None and given.get("model") is None and given.get("data") is None:
        recipe = DEFAULT_RECIPE
    if recipe is None:
        file = draft / f"{name or _name_of_model(settings.get('model_name'))}.yaml"
        file.write_text(to_yaml(Config(), chosen=()), encoding="utf-8")
        recipe = file
    return Call(str(recipe), settings, name or "")


def _settings(given: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """The settings by the names of their flags. `model` and `model_name` may not both be given."""
    settings = {_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    twice = settings.keys() & {name for name, value in flags.items() if value is not None}
    if twice:
        keyword = next(name for name, field in _NAMES.items() if field in twice)
        raise UserError(f"{keyword} is given twice", where="paceline.train", got=f"{keyword} and {_NAMES[keyword]}")
    return settings | flags


def _name_of_model(model: Any) -> str:
    """A name for the run: that of the model's function or class, or of a built-in model."""
    text = ModelConfig.model_name if model is None else model
    if is_module(model):
        text = type(model).__name__
    elif callable(model):
        text = name_of(model)
    elif isinstance(model, str) and (".py:" in model or "/" in model):
        text = model.rpartition(":")[2]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(text)).strip("-._")[:60]
    return name if name and name != _RESERVED else "model"


# --- Objects


def find_objects(call: Call, *, validation: Any, test: Any, classes: Any, transform: Any) -> Call:
    """Convert data and models that are objects. Functions that ranks cannot import are written down."""
    settings = dict(call.settings)
    extra = {"validation": validation, "test": test, "classes": classes, "transform": transform}
    objects = _find_data(call, settings, {name: value for name, value in extra.items() if value is not None})
    instance = settings.get("model_name") if is_module(settings.get("model_name")) else None
    if instance is not None:
        _refuse_other_weights(settings)
        check_module(instance)
    written = tuple(function for _, function in functions_in(settings) if not is_importable(function))
    source = write_down(written) if written else ""
    return dataclasses.replace(
        call, settings=settings, source=source, written=written, objects=objects, instance=instance
    )


def _find_data(call: Call, settings: dict[str, Any], extra: dict[str, Any]) -> DataObjects | None:
    """The data of the call, if it is an object; `settings` then name the data set of arrays."""
    data: Any = settings.get("dataset")
    is_function = callable(data) and not hasattr(data, "__getitem__")
    own_parts = {name: value for name, value in extra.items() if name in ("validation", "test")}
    is_named = data is None or isinstance(data, str) or (is_function and (is_importable(data) or _is_writable(data)))
    if is_named or (is_function and own_parts):
        if extra:
            raise UserError(
                f"{next(iter(own_parts or extra))} belongs to data that is an object",
                where="paceline.train",
                got="no data" if data is None else f"data={data if isinstance(data, str) else name_of(data)}",
                allowed="data=(x, y), a map-style data set, or a dict of them",
                hint="a data set function returns all its parts",
            )
        return None
    from paceline.library.data_objects import call_for_objects, read_objects

    settings["dataset"] = ARRAYS
    if not is_function and settings.get("data_dir") is not None:
        raise UserError("data is given twice", where="paceline.train", got="data and data_dir")
    # The function may ask for the config, and settings of functions need no rank here.
    plain = {name: value for name, value in settings.items() if name in ("data_dir", "seed", "task")}
    config = load_config(call.recipe, as_settings(plain, Path(SOURCE_FILE))).config
    if not is_function:
        return read_objects(data, **extra, task=config.data.task)
    named = dataclasses.replace(config.data, dataset=name_of(data))
    return call_for_objects(data, dataclasses.replace(config, data=named), **extra)


def _is_writable(function: Any) -> bool:
    """Whether the source of a function in a notebook can be written for the ranks."""
    if getattr(function, "__module__", None) != "__main__" or "<locals>" in getattr(
        function, "__qualname__", "<locals>"
    ):
        return False
    try:
        write_down([function])
    except UserError:
        return False
    return True


def _refuse_other_weights(settings: dict[str, Any]) -> None:
    for name in ("weights", "init_from"):
        if settings.get(name) not in (None, "", "none"):
            raise UserError(
                f"{name} and a model that is an instance are two sets of initial weights",
                where=f"paceline.train({name}=...)",
                got=settings[name],
                hint="load the weights into the instance, or give a function as model",
            )


def functions_in(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    """The functions among the settings."""
    return [(name, item) for name, value in settings.items() for item in _items(value) if callable(item)]


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def as_settings(keywords: dict[str, Any], source_file: Path) -> list[Setting]:
    """Keywords as settings: the same conversion and rules as for flags."""
    settings = []
    for key, given in keywords.items():
        where = f"paceline.train({key}=...)"
        field = find_field(key)
        if field is None:
            raise unknown_name(key, where, field_table())
        if given is None:
            continue
        value = write_model_args(given, where) if isinstance(given, dict) and field.arg.is_mapping else given
        words = [reference_to(item, source_file=source_file) if callable(item) else item for item in _items(value)]
        setting = check_texts(Setting(field, as_typed(words), "flag", where))
        is_list = isinstance(value, list | tuple)
        if isinstance(value, bool) != field.is_bool or (is_list and not field.is_tuple):
            raise invalid(setting, repr(value), "True or False" if field.is_bool else "")
        settings.append(setting)
    return settings


# --- Checks


def check_call(call: Call, draft: Path) -> RunPlace:
    """Check everything that can be checked before the start. Returns the place of the run."""
    loaded = call.load(draft)
    place = decide_place(loaded)
    world_size = decide_processes(loaded)
    check_world(loaded, world_size)
    check_faults(loaded, world_size)
    if call.objects is not None:
        from paceline.training.plan import make_plan

        make_plan(loaded.config, call.objects.data.info, world_size)
    if place.resume_from is not None and not call.source:  # the draft has another name than the final file
        refuse_early(place.resume_from, flatten(loaded.config), prefer_best=loaded.config.run.best_is_latest)
    if call.name and place.new_name:
        return dataclasses.replace(place, folder=propose_run_folder(call.name), new_name=call.name)
    return place
