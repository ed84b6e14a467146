"""`paceline train RECIPE [flags]`: start ranks, or be one."""

from __future__ import annotations

import json
import os

from paceline.checkpoints.fetch import prepare_store
from paceline.checkpoints.format import MANIFEST, DamagedCheckpoint
from paceline.checkpoints.identity import refuse_early
from paceline.checkpoints.store import damaged_error, inspect_checkpoint
from paceline.cli import plan
from paceline.cli.help import wants_help
from paceline.cli.main import main
from paceline.errors import EXIT_FINISHED, UserError
from paceline.launch.bytecode import keep_bytecode
from paceline.launch.policy import samples_to_cut
from paceline.launch.request import allowed_worlds, check_joined_world, decide_processes, read_request
from paceline.launch.supervise import Job, Supervisor
from paceline.metrics.safe_output import finish_console
from paceline.metrics.screen import OUTPUT, output_mode, say
from paceline.runs.folder import RunFolder
from paceline.runs.interpreter import forget_safe_path
from paceline.runs.mirror_note import read_own_note
from paceline.runs.patience import read_patiently
from paceline.runs.place import claim_place, decide_place
from paceline.runs.stores import is_url, local_path
from paceline.runtime.detect import (
    Nodes,
    RankEnvironment,
    check_whole_job,
    read_nodes,
    read_rank_environment,
    threads_per_rank,
)
from paceline.runtime.open_files import require_open_files
from paceline.runtime.secret import read_secret
from paceline.settings.fields import flatten
from paceline.settings.load import LoadedConfig
from paceline.settings.processes import parse_processes
from paceline.settings.rules import check_faults, check_world

_HELP = """Train a recipe: one that comes with paceline (see `paceline recipes`) or a YAML file.
Also: --dry-run (print the plan, start nothing), --quiet (only warnings and the result), --json (a row per epoch and
one for the result on standard output, the rest on standard error), --debug (show tracebacks), --trust-code (execute
functions that another person's config.yaml names)."""
_OUTPUTS = {"--quiet": "quiet", "--json": "json"}


def run(arguments: list[str]) -> int:
    if wants_help(arguments, "train", _HELP):
        return 0
    if "--dry-run" in arguments:
        return plan.run([argument for argument in arguments if argument not in ("--dry-run", "--quiet", "--json")])
    arguments = _take_output(arguments)
    require_open_files()
    # Read when torch is loaded: its profiler would announce itself between our lines.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    keep_bytecode()
    environment = read_rank_environment()
    loaded = read_request(arguments)
    check_whole_job(environment)
    if environment is not None:
        if environment.launcher != "paceline":
            check_joined_world(loaded, environment)
        return _be_a_rank(loaded, environment)
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
    if claim_store is not None:
        claim_store()
    return _supervise(loaded, RunFolder(claim_place(place).folder), nodes, arguments)


def _take_output(arguments: list[str]) -> list[str]:
    """How to speak is no part of the run: the ranks learn it from the environment, and no recipe holds it."""
    asked = [flag for flag in _OUTPUTS if flag in arguments]
    if len(asked) > 1:
        raise UserError("--quiet and --json ask for different things", hint="--json with 2>/dev/null")
    if asked:
        os.environ[OUTPUT] = _OUTPUTS[asked[0]]
    return [argument for argument in arguments if argument not in asked]


def _check_nodes(loaded: LoadedConfig, nodes: Nodes) -> None:
    """Agents on several nodes must agree, without having met, on the folder and on the number of ranks."""
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


def _supervise(loaded: LoadedConfig, folder: RunFolder, nodes: Nodes, arguments: list[str]) -> int:
    """Start ranks and see them through."""
    config = loaded.config
    folder.create()
    most = decide_processes(loaded)
    job = Job(
        folder=folder,
        guard=config.guard,
        threads=threads_per_rank(config.parallel, most),
        rank_main=rank_main,
        # One folder for all ranks, decided here: their clocks would name several.
        arguments=["train", *arguments, "--output-dir", _name_of(folder)],
        read_worlds=lambda: allowed_worlds(loaded),
        nodes=nodes,
        accumulate=config.train.accumulate,
        samples_to_cut=lambda processes: samples_to_cut(config, nodes.count * processes),
    )
    code = Supervisor(job).run()
    if output_mode() == "json" and code != EXIT_FINISHED and nodes.own == 0:
        # A finished run's primary has told its result itself.
        print(json.dumps({"kind": "result", "folder": str(folder.path), **folder.read_status(), "exit_code": code}))
    return code


def _name_of(folder: RunFolder) -> str:
    """As a person would name it: a run in a store keeps its URL in config.yaml."""
    note = read_own_note(folder.path)
    return note.url if note is not None else str(folder.path)


def rank_main(arguments: list[str]) -> None:
    """What a rank of our own supervisor runs: the same command. The environment says which rank it is."""
    code = main(arguments)
    finish_console()
    if code != EXIT_FINISHED:
        os._exit(code)  # without waiting for threads that may wait for a lost peer


def _inspect_named_checkpoint(resume: str) -> None:
    """A checkpoint given by its path is looked at before torch is imported: a bad one ends in a moment."""
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
