"""Reads a request to train: a recipe, flags, and every check that needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.data.known_files import require_data_folder
from paceline.data.reference import changed_globals, check_reference
from paceline.data.registry import MADE_DATASETS, check_data_config, check_train_split
from paceline.errors import UserError
from paceline.launch.submission import fetch_command
from paceline.metrics.sinks import check_trackers
from paceline.models.registry import check_model_args, check_model_name, check_weights
from paceline.runs.catalog import locate_run
from paceline.runs.folder import has_checkpoint
from paceline.runs.place import check_init_from, check_paths
from paceline.runs.stores import is_url
from paceline.runs.trust import require_trusted_recipe
from paceline.runtime.detect import RankEnvironment, count_gpu_ranks, count_gpus
from paceline.runtime.resources import usable_cores
from paceline.settings.load import LoadedConfig, load_config
from paceline.settings.recipe_file import DEFAULT_RECIPE, RESOLVED
from paceline.settings.rules import batches_for, check_config, check_faults, check_world, fitting_worlds
from paceline.settings.schema import Config
from paceline.settings.syntax import ProcessRange, code_references, parse_processes
from paceline.settings.tasks import METRICS, has_own_loss, parse_class_weights
from paceline.settings.values import Setting, check_numbers

_MOST_CPU_RANKS = 4
_OWN_COLUMNS = ("kind", "step", "epoch", "phase", "throughput", "time", "merit")


def read_request(recipe: str = DEFAULT_RECIPE, flags: Sequence[str | Setting] = ()) -> LoadedConfig:
    """Resolve and check a recipe and its flags, given as arguments or as settings."""
    loaded = _start_from_one_place(_leave_folder_of_run(load_config(recipe, flags)))
    check_loaded(loaded)
    return _read_class_weights(loaded)


def _read_class_weights(loaded: LoadedConfig) -> LoadedConfig:
    """Class weights of a file become numbers: the file may change, the run's config must not."""
    objective = loaded.config.objective
    numbers = parse_class_weights(objective.class_weights, where=loaded.where("class_weights"))
    if numbers is None:
        return loaded
    objective = dataclasses.replace(objective, class_weights=tuple(f"{number:.12g}" for number in numbers))
    return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, objective=objective))


def _leave_folder_of_run(loaded: LoadedConfig) -> LoadedConfig:
    """A run's config.yaml names the run's folder. A rehearsal does not use that folder unless a flag names it."""
    is_flag = loaded.origin("output_dir") == "flag"
    if is_flag or not loaded.config.run.rehearse or loaded.recipe_path.name != RESOLVED:
        return loaded
    run = dataclasses.replace(loaded.config.run, output_dir="")
    return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, run=run))


def _start_from_one_place(loaded: LoadedConfig) -> LoadedConfig:
    """--init-from replaces the weights of the recipe, which would otherwise be downloaded and then overwritten."""
    model, init_from = loaded.config.model, loaded.config.run.init_from
    if not init_from or model.weights == "none":
        return loaded
    if loaded.origin("weights") == "flag" == loaded.origin("init_from"):
        raise UserError(
            "initial weights come from one place",
            where=f"{loaded.where('weights')} and {loaded.where('init_from')}",
            got=f"weights {model.weights}, init_from {init_from}",
            hint="leave one out",
        )
    if loaded.origin("weights") == "flag":
        run = dataclasses.replace(loaded.config.run, init_from="")
        return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, run=run))
    model = dataclasses.replace(model, weights="none")
    return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, model=model))


def check_loaded(loaded: LoadedConfig) -> None:
    """Every check that does not depend on the number of ranks."""
    check_numbers()
    check_config(loaded)
    check_paths(loaded)
    require_trusted_recipe(loaded)  # first: looking up a name may import a package
    check_data_config(loaded.config.data)
    require_data_folder(loaded.config.data, where=loaded.where("data_dir"), hint=fetch_command(loaded))
    check_train_split(loaded)
    check_model_name(loaded.config.model.model_name)
    check_model_args(loaded.config.model, where=loaded.where("model_args"))
    check_weights(loaded.config.model)
    check_functions(loaded)
    check_init_from(loaded)
    check_teacher(loaded)
    check_proxy(loaded)
    if loaded.origin("track") != "default":  # a default that is missing is left out later, with a note
        check_trackers(loaded.config.run.track, where=loaded.where("track"))


def check_teacher(loaded: LoadedConfig) -> None:
    """The teacher must exist. The ranks check what it was trained for."""
    name = loaded.config.objective.teacher
    if name.startswith("timm:"):
        check_model_name(name)
    elif name and not has_checkpoint(locate_run(name)):
        raise UserError(
            "there is no such teacher",
            where=loaded.where("teacher"),
            got=name,
            allowed="a run with a checkpoint, one of its checkpoints, or timm:NAME",
        )


def check_proxy(loaded: LoadedConfig) -> None:
    """The run that scores the samples must exist. The ranks check what it was trained for."""
    data = loaded.config.data
    if data.keep_share < 1 and not has_checkpoint(locate_run(data.keep_by)):
        raise UserError(
            "there is no such run to score the samples with",
            where=loaded.where("keep_by"),
            got=data.keep_by,
            allowed="a run with a checkpoint, or one of its checkpoints",
        )


def check_functions(loaded: LoadedConfig) -> None:
    """The user's loss and metrics must exist, and the names of metrics must be different."""
    train = loaded.config.train
    if has_own_loss(loaded.config):
        check_reference(train.loss, where=loaded.where("loss"))
    taken = {*_OWN_COLUMNS, "accuracy", *METRICS[loaded.config.data.task]}
    for metric in train.metrics:
        check_reference(metric, where=loaded.where("metrics"))
        name = metric.rpartition(":")[2]
        if name in taken:
            raise UserError(
                f"there would be two columns named {name!r} in the metrics",
                where=loaded.where("metrics"),
                got=metric,
                hint="give the function another name",
            )
        taken.add(name)


def require_folder(loaded: LoadedConfig, who: str) -> None:
    """Refuse the URL of a store: only `paceline train` takes it."""
    output_dir = loaded.config.run.output_dir
    if is_url(output_dir):
        raise UserError(
            f"{who} needs a folder",
            where=loaded.where("output_dir"),
            got=output_dir,
            hint="--output-dir PATH; paceline train itself takes URLs",
        )


def allowed_worlds(loaded: LoadedConfig) -> list[int]:
    """The numbers of local ranks this run may have, smallest first: those that flags and batch allow.

    Without --processes, only the largest number that fits this machine.
    """
    config = loaded.config
    if config.parallel.strategy == "single":
        return [1]
    asked = parse_processes(config.parallel.processes)
    if not asked.is_open:
        fitting = fitting_worlds(config, asked)
        if asked.low < asked.high and fitting:
            room = count_gpu_ranks(config.parallel) or asked.high
            return [size for size in fitting if size <= room] or fitting[:1]
        return [asked.high]
    return (fitting_worlds(config, ProcessRange(1, _room(config))) or [1])[-1:]


def _room(config: Config) -> int:
    """Ranks that this machine has GPUs or cores for."""
    return count_gpu_ranks(config.parallel) or min(usable_cores(), _MOST_CPU_RANKS)


def explain_fewer_ranks(loaded: LoadedConfig) -> str | None:
    """If the batch or the lanes leave GPUs or cores without a rank: why, and which batch would use all of them."""
    config = loaded.config
    if config.parallel.strategy == "single" or not parse_processes(config.parallel.processes).is_open:
        return None
    room, ranks = _room(config), decide_processes(loaded)
    is_tree = not config.parallel.exact or room & (room - 1) == 0  # --exact needs a power of two
    if ranks == room or not is_tree:
        return None
    things = "GPUs" if count_gpus(config.parallel) else "cores"
    batches = " or ".join(map(str, batches_for(config, room)))
    remedy = f"--global-batch-size {batches} uses {room}" if batches else f"--lanes {room} uses {room}"
    return (
        f"{ranks} rank{'s' if ranks > 1 else ''} for {room} {things}: global_batch_size "
        f"{config.train.global_batch_size} cannot be divided equally; {remedy}"
    )


def explain_unused_data(loaded: LoadedConfig) -> str | None:
    """Without a recipe, `paceline train --data-dir PICTURES` trains the default one, which reads no data."""
    data = loaded.config.data
    if loaded.origin("data_dir") != "flag" or data.dataset not in MADE_DATASETS:
        return None
    return f"--data-dir is not used: {data.dataset} data is made here; paceline recipes lists recipes that read data"


def explain_lost_state(loaded: LoadedConfig) -> str | None:
    """What a loss, a metric or a model keeps in global variables is in no checkpoint. A data function may cache."""
    files = {item.path for item in code_references(loaded.config) if item.is_file and item.field != "dataset"}
    kept = {path: changed_globals(path) for path in sorted(files)}
    lines = [f"{path} changes the global variables {', '.join(names)}" for path, names in kept.items() if names]
    if not lines:
        return None
    return f"{'; '.join(lines)}: each rank has its own, and they are lost at a restart; keep state in a model's buffer"


def decide_processes(loaded: LoadedConfig) -> int:
    """The number of local ranks to start with: the largest that is allowed."""
    return allowed_worlds(loaded)[-1]


def check_joined_world(loaded: LoadedConfig, environment: RankEnvironment) -> None:
    """Another launcher decides the world size. The settings must allow it."""
    processes = loaded.config.parallel.processes
    if not parse_processes(processes).holds(environment.world_size):
        raise UserError(
            "the launcher started another number of ranks than asked for",
            where=loaded.where("processes"),
            got=f"{environment.world_size} ranks by {environment.launcher}, processes {processes}",
            hint="leave --processes out: the launcher decides",
        )
    if loaded.config.parallel.strategy == "single" and environment.world_size > 1:
        raise UserError(
            "strategy single runs on one process",
            where=loaded.where("strategy"),
            got=f"{environment.world_size} ranks by {environment.launcher}",
            hint="--strategy ddp",
        )
    check_world(loaded, environment.world_size)
    check_faults(loaded, environment.world_size)
