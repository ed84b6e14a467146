"""Parameters of Runnable become a recipe and flags.

A parameter is any recipe key, `recipe` itself, or one of two additional names. `batch_size` is the batch of one process
(a recipe has the global batch). `learning_rate` is the actual rate (a recipe has the rate for 256 samples). Parameters
come from a YAML file. The environment (`RUNNABLE_PRM_EPOCHS=3`) takes precedence.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline.errors import UserError
from paceline.launch.request import check_loaded
from paceline.runtime.detect import count_gpus
from paceline.runtime.resources import usable_cores
from paceline.settings.declare import Range, fields_of
from paceline.settings.load import LoadedConfig, load_config
from paceline.settings.recipe_file import read_pairs
from paceline.settings.rules import check_world, fitting_worlds
from paceline.settings.schema import field_table
from paceline.settings.small_files import parse_json
from paceline.settings.syntax import ProcessRange, parse_processes
from paceline.settings.values import Setting, as_typed, build, check_texts, find_in, unknown_name

if TYPE_CHECKING:
    import yaml

DEFAULT_RECIPE = "synthetic-mlp"
PREFIX = "RUNNABLE_PRM_"
_OF_RUNNABLE = ("run_id", "retry_run_id", "retry_indicator", "log_level")  # an Argo workflow passes them on
_DECIDED = ("output_dir", "resume", "load_policy", "rehearse")  # the run id decides about the run's folder
_LR_BATCH = 256  # a recipe's base_lr is for this batch size


@dataclass(frozen=True)
class OwnParameters:
    """The parameters that are not settings of a recipe."""

    recipe: str = DEFAULT_RECIPE
    batch_size: Annotated[int | None, Range(low=1)] = None
    learning_rate: Annotated[float | None, Range(low=0, high=float("inf"), open_low=True, open_high=True)] = None


@dataclass(frozen=True)
class GivenParameter:
    """A parameter's value and its origin."""

    value: Any
    where: str


@dataclass(frozen=True)
class TrainArguments:
    """The arguments of `paceline train`."""

    recipe: str
    flags: list[str]


def read_parameters(file: str, environment: Mapping[str, str] = os.environ) -> dict[str, GivenParameter]:
    """The parameters that Runnable will use, each with its line or variable."""
    given = _read_file(Path(file))
    for name, text in environment.items():
        if name.startswith(PREFIX):
            try:
                value = parse_json(text)
            except ValueError:
                value = text
            given[name.removeprefix(PREFIX).lower()] = GivenParameter(value, f"environment variable {name}")
    return given


def _read_file(path: Path) -> dict[str, GivenParameter]:
    if not path.is_file():
        raise UserError(
            "there is no such file of parameters",
            where="environment variable RUNNABLE_PARAMETERS_FILE",
            got=str(path),
            allowed="a YAML file of `name: value` lines",
        )
    pairs = read_pairs(path, "the file of parameters")
    if pairs is None:
        raise UserError("the file of parameters is empty", where=str(path), allowed="`key: value` lines")
    given: dict[str, GivenParameter] = {}
    for pair in pairs:
        if pair.key in given:
            raise UserError(f"{pair.key} is given twice", where=f"{pair.where} and {given[pair.key].where}")
        given[pair.key] = GivenParameter(_as_typed(pair.node), pair.where)
    return given


def _as_typed(node: yaml.Node) -> Any:
    """Scalars stay the typed text, as in a recipe."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return [_as_typed(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {}
    return None if node.tag == "tag:yaml.org,2002:null" else str(node.value)


def name_parameters(values: Mapping[str, Any]) -> dict[str, GivenParameter]:
    """The same for parameters that Runnable passes to a step, without their origin."""
    return {name: GivenParameter(value, f"parameter {name}") for name, value in values.items()}


def make_request(parameters: Mapping[str, GivenParameter]) -> tuple[TrainArguments, LoadedConfig]:
    """Translate the parameters, and check them before a process is started."""
    given = _read_settings({name: item for name, item in parameters.items() if name not in _OF_RUNNABLE})
    own = build(OwnParameters, [setting for setting in given.values() if setting.field.owner is OwnParameters])
    settings = {name: setting for name, setting in given.items() if setting.field.owner is not OwnParameters}
    if own.batch_size is not None:
        _add(settings, _global_batch(own.batch_size, given["batch_size"], settings), "batch_size")
    if "exact" in settings and settings["exact"].values == ("true",) and "lanes" not in settings:
        _keep_lanes(settings)
    if own.learning_rate is not None:
        loaded = _load(own.recipe, settings)
        base_lr = own.learning_rate * _LR_BATCH / loaded.config.train.global_batch_size
        _add(settings, _setting("base_lr", base_lr, given["learning_rate"].where), "learning_rate")
    loaded = _load(own.recipe, settings)
    return TrainArguments(own.recipe, [token for setting in settings.values() for token in setting.tokens()]), loaded


def _read_settings(given: Mapping[str, GivenParameter]) -> dict[str, Setting]:
    table = {**field_table(), **fields_of(OwnParameters)}
    settings: dict[str, Setting] = {}
    for name, item in given.items():
        field = find_in(table, name)
        if field is None:
            raise unknown_name(name, item.where, table)
        if field.name in _DECIDED:
            raise UserError(
                f"{name} is not a parameter: the run id decides about the run's folder",
                where=item.where,
                hint="RUNNABLE_RUN_ID=NAME chooses it, RUNNABLE_RETRY_RUN_ID=NAME continues it",
            )
        items = item.value if isinstance(item.value, list) else [item.value]
        if any(value is None or isinstance(value, dict | list) for value in items):
            found = "nothing" if items == [None] else "a mapping"
            raise UserError(f"{name} needs a value", where=item.where, got=found)
        _add(settings, check_texts(Setting(field, as_typed(items), "flag", item.where)), name)
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


def _setting(name: str, value: float, where: str) -> Setting:
    return Setting(field_table()[name], (repr(value),), "flag", where)


def _world_size(settings: Mapping[str, Setting]) -> int | None:
    """The requested number of processes; None if it is not given as one positive number."""
    world = settings.get("processes")
    if world is None or len(world.values) != 1 or not world.values[0].isdecimal():
        return None
    return int(world.values[0]) or None


def _global_batch(size: int, batch: Setting, settings: Mapping[str, Setting]) -> Setting:
    """The batch of one process times the requested number of processes, also on a machine with fewer cores."""
    world_size = _world_size(settings)
    if world_size is None:
        given = settings.get("processes")
        raise UserError(
            "batch_size is for one process, so their number must be known",
            where=batch.where,
            got="no world_size" if given is None else f"world_size {' '.join(given.values) or 'without a value'}",
            hint="give world_size as a number, or global_batch_size instead of batch_size",
        )
    return _setting("global_batch_size", size * world_size, f"{batch.where} (times world_size {world_size})")


def _keep_lanes(settings: dict[str, Setting]) -> None:
    """Exact weights depend on the lanes. Use the requested number of processes, also if fewer are started."""
    world_size = _world_size(settings)
    if world_size is not None:
        settings["lanes"] = _setting("lanes", world_size, settings["processes"].where)


def _load(recipe: str, settings: Mapping[str, Setting]) -> LoadedConfig:
    """The resolved config, after every check that `paceline train` would make."""
    loaded = load_config(recipe, list(settings.values()))
    check_loaded(loaded)
    processes = parse_processes(loaded.config.parallel.processes)
    if processes.low == processes.high and not processes.is_open:
        check_world(loaded, processes.high)
    return loaded


def load_request(request: TrainArguments) -> LoadedConfig:
    return load_config(request.recipe, request.flags)


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
