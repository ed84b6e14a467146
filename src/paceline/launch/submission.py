"""What every submission does: check the ranks of the job and its folder, and record the job."""

from __future__ import annotations

import math
import os
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from paceline.data.known_files import missing_files
from paceline.errors import DataError, UserError
from paceline.launch.job_record import RECORD, JobRecord
from paceline.models.external import is_fetched, is_of_collection
from paceline.models.published import PUBLISHED, published_path
from paceline.runs.folder import RunFolder
from paceline.settings.load import LoadedConfig, load_config
from paceline.settings.recipe_file import shipped_recipes
from paceline.settings.rules import check_world


def check_ranks(loaded: LoadedConfig, *, nodes: int, ranks_per_node: int, has_gpus: bool) -> None:
    """Device, strategy, batch and lanes must suit the ranks that the job will have."""
    parallel, world_size = loaded.config.parallel, nodes * ranks_per_node
    if loaded.origin("processes") == "flag":
        hint = f"--nodes {nodes} --processes-per-node {parallel.processes}"
        raise UserError("a job's ranks are given per node", where=loaded.where("processes"), hint=hint)
    if parallel.device != "auto" and (parallel.device == "cuda") != has_gpus:
        asked = f"{ranks_per_node} " + ("GPUs" if has_gpus else "processes") + " per node"
        hint = "leave --device out" if has_gpus else f"--gpus-per-node {ranks_per_node}"
        got = f"--device {parallel.device}, {asked}"
        raise UserError("device and nodes contradict each other", where=loaded.where("device"), got=got, hint=hint)
    if parallel.strategy == "single" and world_size > 1:
        got = f"{nodes} nodes x {ranks_per_node} ranks"
        raise UserError("strategy single runs on one process", where=loaded.where("strategy"), got=got)
    try:
        check_world(loaded, world_size)
    except UserError as error:
        hint = (error.hint or "").replace("--processes", "nodes x ranks per node of")
        raise UserError(
            error.what, where=error.where, got=error.got, allowed=error.allowed, hint=hint or None
        ) from error


def is_finished(folder: RunFolder, loaded: LoadedConfig) -> bool:
    """Whether the run is finished. Prints it."""
    status = folder.read_status()
    if status.get("status") != "finished" or not folder.config.is_file():
        return False
    done, asked = load_config(str(folder.config), []).config.train, loaded.config.train
    if loaded.config.run.resume and (done.epochs, done.max_steps) != (asked.epochs, asked.max_steps):
        return False  # it continues for longer
    print(f"{folder.path} is finished ({status.get('step')} steps); nothing was submitted")
    return True


def require_writable(folder: Path) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        got = f"{there} is not a folder" if not there.is_dir() else f"{there} is not writable for you"
        raise UserError("the run folder cannot be created", where=str(folder), got=got, hint="--output-dir PATH")


def refuse_second_job(folder: RunFolder, job: str, state: str) -> NoReturn:
    raise UserError(
        "this run has a job already",
        where=str(folder.path),
        got=f"{job}, {state.lower()}",
        hint=f"paceline status {folder.path}, or paceline cancel {folder.path}",
    )


def seconds_to_save(folder: RunFolder) -> tuple[float, int]:
    """The duration of the run's last save (0: none yet), and the time that a warning must leave for the next one."""
    save_s = float(folder.read_status().get("save_s") or 0.0)
    return save_s, math.ceil(2 * save_s + 10)


def keep_record(record: JobRecord, folder: RunFolder) -> None:
    try:
        record.write(folder.path)
    except OSError as error:  # the job is submitted, and its name must not be lost
        print(f"warning: {RECORD} cannot be written: {error.strerror}; remember job {record.job_id}", file=sys.stderr)


def count_ranks(world_size: int, nodes: int) -> str:
    return f"{world_size} rank{'s' if world_size > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"


def print_next_commands(folder: RunFolder, files: str) -> None:
    path = shlex.quote(os.path.relpath(folder.path))
    print(f"  folder:  {path} {files}")
    print(f"  follow:  paceline status {path}\n           paceline logs {path} --follow")
    print(f"  stop:    paceline cancel {path}")


def default_threads(loaded: LoadedConfig, *, has_gpus: bool) -> int:
    """CPUs of a rank, unless given."""
    parallel, data = loaded.config.parallel, loaded.config.data
    return parallel.omp_num_threads or (1 + data.num_workers if has_gpus else 1)


# Data and weights that a job reads must be here before it is submitted: compute nodes often have no internet.


def require_inputs(loaded: LoadedConfig, *, brings_own_weights: bool = False) -> None:
    """DataError unless they are. A job in a container has another home folder: its weights are its own."""
    config = loaded.config
    data_dir = Path(config.data.data_dir)
    if missing := missing_files(config.data.dataset, data_dir):
        raise DataError(
            f"{config.data.dataset} is not on this machine, and compute nodes may have no internet",
            where=str(data_dir.absolute()),
            got=f"no {', '.join(missing)}",
            hint=fetch_command(loaded),
        )
    is_published = config.model.weights == "imagenet" or is_of_collection(config.model.weights)
    if is_published and not brings_own_weights:
        _require_weights(loaded)


def _require_weights(loaded: LoadedConfig) -> None:
    model = loaded.config.model
    name = model.weights if is_of_collection(model.weights) else model.model_name
    where = str(published_path(name)) if name in PUBLISHED else None
    is_there = published_path(name).is_file() if name in PUBLISHED else is_fetched(name)
    if is_there is False:
        raise DataError(
            f"the ImageNet weights of {name} are not on this machine, and compute nodes may have no internet",
            where=where,
            got="no such file" if where else "nothing in the folder where the collection keeps its downloads",
            hint=f"{fetch_command(loaded, weights=True)}\nor --weights PATH, or --weights none",
        )


def fetch_command(loaded: LoadedConfig, *, weights: bool = False) -> str:
    """The command that brings what is missing."""
    is_shipped = shipped_recipes().get(loaded.recipe_path.stem) == loaded.recipe_path
    words = ["paceline", "data", "fetch", loaded.recipe_path.stem if is_shipped else str(loaded.recipe_path)]
    words += ["--weights"] if weights else []
    flags = ("model_name",) if weights else ("dataset", "data_dir")
    for flag in flags:
        if loaded.origin(flag) == "flag":
            value = getattr(loaded.config.model if flag == "model_name" else loaded.config.data, flag)
            words += [f"--{flag.replace('_', '-')}", value]
    return shlex.join(words)
