"""Runnable's parameters become a recipe and flags.

A parameter is any recipe key, `recipe` itself, or one of two additional names. `batch_size` is the batch of one process
(a recipe has the global batch). `learning_rate` is the actual rate (a recipe has the rate for 256 samples). Parameters
come from a YAML file. The environment (`RUNNABLE_PRM_EPOCHS=3`) takes precedence.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import UserError
from paceline.launch.request import check_loaded
from paceline.runtime.cores import usable_cores
from paceline.runtime.detect import count_gpus
from paceline.settings.fields import FieldSpec, find_field
from paceline.settings.load import LoadedConfig, load_config
from paceline.settings.processes import ProcessRange, parse_processes
from paceline.settings.recipe_file import Setting, unknown_name
from paceline.settings.rules import check_world, fitting_worlds
from paceline.settings.small_files import YamlError, compose_yaml, parse_json

DEFAULT_RECIPE = "synthetic-mlp"
PREFIX = "RUNNABLE_PRM_"
_RUNNABLES_OWN = (
    "run_id",
    "retry_run_id",
    "retry_indicator",
    "log_level",
)  # an Argo workflow passes them to its first step
_DECIDED = ("output_dir", "resume", "load_policy", "rehearse")  # the run id decides about the run's folder
_LR_BATCH = 256  # a recipe's base_lr is for this batch size


@dataclass(frozen=True)
class Given:
    """A parameter's value and its origin."""

    value: Any
    where: str


@dataclass(frozen=True)
class Request:
    """The arguments of `paceline train`."""

    recipe: str
    flags: list[str]


def read_parameters(file: str, environment: Mapping[str, str] = os.environ) -> dict[str, Given]:
    """The parameters that Runnable will use, each with its line or variable."""
    given = _read_file(Path(file))
    for name, text in environment.items():
        if name.startswith(PREFIX):
            try:
                value = parse_json(text)
            except ValueError:
                value = text
            given[name.removeprefix(PREFIX).lower()] = Given(value, f"environment variable {name}")
    return given


def _read_file(path: Path) -> dict[str, Given]:
    if not path.is_file():
        raise UserError(
            "there is no such file of parameters",
            where="environment variable RUNNABLE_PARAMETERS_FILE",
            got=str(path),
            allowed="a YAML file of `name: value` lines",
        )
    try:
        root = compose_yaml(path)
    except YamlError as error:
        raise UserError(f"the parameters are not valid YAML: {error}", where=error.place(path)) from error
    except OSError as error:
        raise UserError("the parameters cannot be read", where=str(path), got=error.strerror) from error
    if not isinstance(root, yaml.MappingNode):
        raise UserError("parameters must be `name: value` lines", where=str(path))
    given: dict[str, Given] = {}
    for key, node in root.value:
        name, where = str(key.value), f"{path}, line {key.start_mark.line + 1}"
        if name in given:
            raise UserError(f"{name} is given twice", where=f"{where} and {given[name].where}")
        given[name] = Given(_as_typed(node), where)
    return given


def _as_typed(node: yaml.Node) -> Any:
    """Scalars stay the typed text, as in a recipe."""
    if isinstance(node, yaml.SequenceNode):
        return [_as_typed(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {}
    return None if node.tag == "tag:yaml.org,2002:null" else str(node.value)


def name_parameters(values: Mapping[str, Any]) -> dict[str, Given]:
    """The same for parameters that Runnable passes to a step, without their origin."""
    return {name: Given(value, f"parameter {name}") for name, value in values.items()}


def make_request(parameters: Mapping[str, Given]) -> tuple[Request, LoadedConfig]:
    """Translate the parameters, and check them before a process is started."""
    given = {name: item for name, item in parameters.items() if name not in _RUNNABLES_OWN}
    recipe = _one_text("recipe", given.pop("recipe", Given(DEFAULT_RECIPE, "")))
    batch, rate = given.pop("batch_size", None), given.pop("learning_rate", None)
    settings = _read_settings(given)
    if batch is not None:
        _add(settings, _global_batch(batch, settings), "batch_size")
    if "exact" in settings and settings["exact"].values == ("true",) and "lanes" not in settings:
        _keep_lanes(settings)
    if rate is not None:
        loaded = _load(recipe, settings)
        _check(loaded)
        batch_size = loaded.config.train.global_batch_size
        base_lr = _number("learning_rate", rate, float) * _LR_BATCH / batch_size
        _add(settings, _setting("base_lr", base_lr, rate.where), "learning_rate")
    loaded = _load(recipe, settings)
    _check(loaded)
    return Request(recipe, _flags(settings)), loaded


def _read_settings(given: Mapping[str, Given]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for name, item in given.items():
        field = find_field(name)
        if field is None:
            raise unknown_name(name, item.where)
        if field.name in _DECIDED:
            raise UserError(
                f"{name} is not a parameter: the run id decides about the run's folder",
                where=item.where,
                hint="RUNNABLE_RUN_ID=NAME chooses it, RUNNABLE_RETRY_RUN_ID=NAME continues it",
            )
        _add(settings, Setting(field, _values(field, name, item), "flag", item.where), name)
    return settings


def _add(settings: dict[str, Setting], setting: Setting, name: str) -> None:
    other = settings.get(setting.field.name)
    if other is not None:
        raise UserError(
            f"{setting.field.name} is given twice, once as {name}",
            where=f"{setting.where} and {other.where}",
            hint="leave one out",
        )
    settings[setting.field.name] = setting


def _texts(name: str, given: Given) -> tuple[str, ...]:
    """A value as typed text."""
    items = given.value if isinstance(given.value, list) else [given.value]
    if any(item is None or isinstance(item, dict | list) for item in items):
        found = "nothing" if items == [None] else "a mapping"
        raise UserError(f"{name} needs a value", where=given.where, got=found)
    return tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in items)


def _one_text(name: str, given: Given) -> str:
    texts = _texts(name, given)
    if len(texts) != 1:
        raise UserError(f"{name} needs one value", where=given.where, got=", ".join(texts) or "an empty list")
    return texts[0]


def _values(field: FieldSpec, name: str, given: Given) -> tuple[str, ...]:
    texts = _texts(name, given)
    is_wrong_flag = field.is_bool and texts not in (("true",), ("false",))
    if is_wrong_flag or (len(texts) != 1 and not field.is_tuple):
        raise UserError(f"{name}: {' '.join(texts)!r} is not valid", where=given.where, allowed=field.expects)
    return texts


def _setting(name: str, value: float, where: str) -> Setting:
    field = find_field(name)
    assert field is not None
    return Setting(field, (repr(value),), "flag", where)


def _global_batch(batch: Given, settings: Mapping[str, Setting]) -> Setting:
    """The batch of one process times the requested number of processes, also on a machine with fewer cores."""
    world = settings.get("processes")
    if world is None or not world.values[0].isdecimal() or int(world.values[0]) == 0:
        raise UserError(
            "batch_size is for one process, so their number must be known",
            where=batch.where,
            got="no world_size" if world is None else f"world_size {world.values[0]}",
            hint="give world_size as a number, or global_batch_size instead of batch_size",
        )
    size = _number("batch_size", batch, int) * int(world.values[0])
    return _setting("global_batch_size", size, f"{batch.where} (times world_size {world.values[0]})")


def _keep_lanes(settings: dict[str, Setting]) -> None:
    """Exact weights depend on the lanes. Use the requested number of processes, also if fewer are started."""
    world = settings.get("processes")
    if world is not None and world.values[0].isdecimal() and int(world.values[0]) > 0:
        settings["lanes"] = _setting("lanes", int(world.values[0]), world.where)


def _number(name: str, given: Given, kind: type[int] | type[float]) -> float:
    text = " ".join(_texts(name, given))
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        allowed = "a whole number, 1 or more" if kind is int else "a number greater than 0"
        raise UserError(f"{name}: {text!r} is not valid", where=given.where, allowed=allowed)
    return number


def _flags(settings: Mapping[str, Setting]) -> list[str]:
    return [token for setting in settings.values() for token in setting.tokens()]


def _load(recipe: str, settings: Mapping[str, Setting]) -> LoadedConfig:
    """Resolve the settings. Errors name the user's line or variable, not our flag."""
    try:
        loaded = load_config(recipe, _flags(settings))
    except UserError as error:
        blamed = next((s for s in settings.values() if error.where == f"flag {s.field.flag}"), None)
        error.where = blamed.where if blamed else error.where
        raise
    named = {
        name: dataclasses.replace(s, where=settings[name].where) if name in settings else s
        for name, s in loaded.settings.items()
    }
    return dataclasses.replace(loaded, settings=named)


def load_request(request: Request) -> LoadedConfig:
    return load_config(request.recipe, request.flags)


def _check(loaded: LoadedConfig) -> None:
    """Raise the errors that `paceline train` would raise later."""
    check_loaded(loaded)
    processes = parse_processes(loaded.config.parallel.processes)
    if processes.low == processes.high and not processes.is_open:
        check_world(loaded, processes.high)


def fit_world(loaded: LoadedConfig) -> tuple[list[str], str | None]:
    """Flags that reduce the number of ranks to fit this machine, and a warning; empty if all ranks fit."""
    config = loaded.config
    asked = parse_processes(config.parallel.processes)
    gpus = count_gpus(config.parallel)
    room = gpus or usable_cores()
    if asked.is_open or asked.high <= room:
        return [], None
    ranks = (fitting_worlds(config, ProcessRange(1, room)) or [1])[-1]
    batch = config.train.global_batch_size
    there = _count(room, "GPU" if gpus else "core")
    warning = (
        f"warning: world_size {config.parallel.processes} is more than this machine allows ({there}): "
        f"{_count(ranks, 'rank')} with {batch // ranks} samples each; the global batch stays {batch}"
    )
    return ["--processes", str(ranks) if asked.low == asked.high else f"{min(asked.low, ranks)}:{ranks}"], warning


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number > 1 else "")
