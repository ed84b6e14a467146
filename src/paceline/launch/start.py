"""Starts a training: checks everything about its place, then supervises ranks, or is one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoints.fetch import prepare_store
from paceline.checkpoints.format import MANIFEST, DamagedCheckpoint
from paceline.checkpoints.identity import refuse_early
from paceline.checkpoints.store import damaged_error, inspect_checkpoint
from paceline.data.reference import is_reference
from paceline.errors import EXIT_FINISHED, UserError
from paceline.launch.policy import samples_to_cut
from paceline.launch.request import (
    allowed_worlds,
    check_joined_world,
    decide_processes,
    explain_fewer_ranks,
    explain_lost_state,
    explain_unused_data,
)
from paceline.launch.supervise import Job, Supervisor
from paceline.metrics.screen import output_mode, say
from paceline.runs.folder import RunFolder
from paceline.runs.interpreter import forget_safe_path
from paceline.runs.patience import read_patiently
from paceline.runs.place import claim_place, decide_place
from paceline.runs.stores import is_url, local_path, read_own_note
from paceline.runtime.detect import (
    Nodes,
    RankEnvironment,
    check_whole_job,
    read_nodes,
    read_rank_environment,
    threads_per_rank,
)
from paceline.runtime.secret import read_secret
from paceline.settings.load import LoadedConfig
from paceline.settings.rules import check_faults, check_world
from paceline.settings.schema import flatten
from paceline.settings.syntax import parse_processes

RankMain = Callable[[list[str]], None]


class TrainingEnd(NamedTuple):
    """How the training ended in this process."""

    exit_code: int
    folder: Path | None  # the run's; None in a rank, and on all nodes but the first


def start_training(loaded: LoadedConfig, arguments: list[str], rank_main: RankMain) -> TrainingEnd:
    """Run the ranks of this node until the run ends, or be a rank if a launcher started this process.

    `arguments` are those of `paceline train`, which every rank gets again. `rank_main` runs them in a rank.
    """
    environment = read_rank_environment()
    check_whole_job(environment)
    if environment is not None:
        if environment.launcher != "paceline":
            check_joined_world(loaded, environment)
        return TrainingEnd(_be_a_rank(loaded, environment), None)
    nodes = read_nodes()
    _check_nodes(loaded, nodes)
    claim_store = prepare_store(loaded, say) if nodes.own == 0 else None
    _inspect_named_checkpoint(loaded.config.run.resume)
    place = decide_place(loaded)
    if place.resume_from is not None:
        refuse_early(place.resume_from, flatten(loaded.config), prefer_best=loaded.config.run.best_is_latest)
    if nodes.own == 0:
        RunFolder(place.folder).refuse_if_owned()
    check_world(loaded, nodes.count * decide_processes(loaded))
    check_faults(loaded, nodes.count * decide_processes(loaded))
    _check_parts_of_model(loaded, nodes.count * decide_processes(loaded))
    if loaded.config.run.resume == "auto" and place.resume_from is None:
        say("note: --resume auto found no checkpoint to continue from; a new run starts")
    for note in (explain_unused_data(loaded), explain_fewer_ranks(loaded), explain_lost_state(loaded)):
        if note is not None:
            say(f"note: {note}")
    if claim_store is not None:
        claim_store()
    folder = RunFolder(claim_place(place).folder)
    exit_code = _supervise(loaded, folder, nodes, arguments, rank_main)
    return TrainingEnd(exit_code, folder.path if nodes.own == 0 else None)


def _check_parts_of_model(loaded: LoadedConfig, world_size: int) -> None:
    """Refuse settings for parts that a built-in model does not have, or for other classes. They need torch here.

    External models and data sets of a user's function run in the ranks only, which make the same checks.
    """
    config = loaded.config
    optim, train = config.optim, config.train
    names_layers = bool(optim.freeze) or optim.layer_decay != 1 or optim.head_lr_factor != 1
    is_own = ":" not in config.model.model_name and not is_reference(config.data.dataset)
    names_more = bool(config.model.model_args) or train.activation_checkpointing or train.stop_early > 0
    names_classes = bool(config.objective.class_weights or config.objective.teacher)
    if not is_own or not (names_layers or names_more or names_classes):
        return
    import torch

    from paceline.data.augment import build_pipeline
    from paceline.data.registry import describe_dataset
    from paceline.models.registry import build_model
    from paceline.training.objective import require_weight_per_class
    from paceline.training.plan import check_parts, make_plan
    from paceline.training.teacher import check_recorded_teacher

    plan = make_plan(config, describe_dataset(config.data, train.seed), world_size)
    with torch.device("meta"):
        model = build_model(config.model, plan.input_shape, plan.info.num_classes, load_weights=False)
    check_parts(model, plan)
    require_weight_per_class(config, plan.info.classes)
    check_recorded_teacher(config.objective.teacher, plan.info, build_pipeline(config.data, plan.info, train.seed))


def _check_nodes(loaded: LoadedConfig, nodes: Nodes) -> None:
    """The launchers of several nodes must agree on the folder and on the number of ranks before they connect."""
    if nodes.count == 1:
        return
    read_secret()
    if is_url(loaded.config.run.resume):
        raise UserError(
            "a run on several nodes is fetched by one of them, the others cannot know its checkpoints",
            where=loaded.where("resume"),
            got=loaded.config.run.resume,
            hint="--output-dir URL --resume auto",
        )
    if not loaded.config.run.output_dir:
        raise UserError(
            "a run on several nodes needs a folder that all of them know", hint="--output-dir PATH, on shared storage"
        )
    processes = parse_processes(loaded.config.parallel.processes)
    if processes.is_open or processes.low != processes.high:
        raise UserError(
            "a run on several nodes needs the number of ranks of each node",
            where=loaded.where("processes"),
            got=loaded.config.parallel.processes,
            hint="--processes 4 for four ranks on every node",
        )


def _supervise(loaded: LoadedConfig, folder: RunFolder, nodes: Nodes, arguments: list[str], rank_main: RankMain) -> int:
    """Start ranks, and supervise them until the run ends."""
    config = loaded.config
    folder.create()
    most = decide_processes(loaded)
    job = Job(
        folder=folder,
        guard=config.guard,
        threads=threads_per_rank(config.parallel, most),
        rank_main=rank_main,
        # The folder is decided here. Each rank would name it by its own clock. One argument: a name may begin with --.
        arguments=["train", *arguments, f"--output-dir={_name_of(folder)}"],
        read_worlds=lambda: allowed_worlds(loaded),
        nodes=nodes,
        accumulate=config.train.accumulate,
        lanes=(config.parallel.lanes or nodes.count * most) if config.parallel.exact else 0,
        samples_to_cut=lambda processes: samples_to_cut(config, nodes.count * processes),
    )
    code = Supervisor(job).run()
    if output_mode() == "json" and code != EXIT_FINISHED and nodes.own == 0:
        # The primary rank of a finished run has printed the result.
        print(json.dumps({"kind": "result", "folder": str(folder.path), **folder.read_status(), "exit_code": code}))
    return code


def _name_of(folder: RunFolder) -> str:
    """The path, or for a run in a store its URL, which config.yaml keeps."""
    note = read_own_note(folder.path)
    return note.url if note is not None else str(folder.path)


def _inspect_named_checkpoint(resume: str) -> None:
    """Check a checkpoint that is given by its path before torch is imported: a damaged one is refused at once."""
    path = local_path(resume)
    if resume in ("", "auto") or not os.path.lexists(path / MANIFEST):
        return
    try:
        read_patiently(f"reading {path.name}", path, lambda: inspect_checkpoint(path))
    except DamagedCheckpoint as found:
        raise damaged_error(path, found) from found


def _be_a_rank(loaded: LoadedConfig, environment: RankEnvironment) -> int:
    from paceline.training.worker import run_worker

    forget_safe_path()  # set by our scripts for torchrun, which starts the ranks
    run_worker(loaded, environment)
    return 0
