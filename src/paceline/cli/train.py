"""`paceline train RECIPE [flags]`: start ranks, or be one."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.checkpoints.format import MANIFEST, DamagedCheckpoint
from paceline.checkpoints.store import damaged_error, inspect_checkpoint
from paceline.cli import plan
from paceline.cli.request import check_joined_world, decide_processes, read_request, wants_help
from paceline.config.load import LoadedConfig
from paceline.config.rules import check_world
from paceline.launch.local import launch_ranks
from paceline.runs.place import decide_place
from paceline.world.detect import ALONE, RankEnvironment, read_rank_environment, threads_per_rank

_HELP = """Train a recipe: one that comes with paceline (see `paceline recipes`) or a YAML file.
Also: --dry-run (print the plan, start nothing), --debug (show tracebacks)."""


def run(arguments: list[str]) -> int:
    if wants_help(arguments, "train", _HELP):
        return 0
    if "--dry-run" in arguments:
        return plan.run([argument for argument in arguments if argument != "--dry-run"])
    environment = read_rank_environment()
    loaded = read_request(arguments)
    if environment is not None:
        if environment.launcher != "paceline":
            check_joined_world(loaded, environment)
        return _be_a_rank(loaded, environment)
    _inspect_named_checkpoint(loaded.config.run.resume)
    processes = decide_processes(loaded)
    check_world(loaded, processes)
    place = decide_place(loaded)
    if processes == 1:
        return _be_a_rank(loaded, ALONE)
    # One folder for all ranks, decided here: their clocks would name several.
    return launch_ranks(
        ["train", *arguments, "--output-dir", str(place.folder)],
        processes=processes,
        threads=threads_per_rank(loaded.config.parallel, processes),
    )


def _inspect_named_checkpoint(resume: str) -> None:
    """A checkpoint given by its path is looked at before torch is imported: a bad one ends in a moment."""
    path = Path(resume)
    if resume in ("", "auto") or not os.path.lexists(path / MANIFEST):
        return
    try:
        inspect_checkpoint(path)
    except DamagedCheckpoint as found:
        raise damaged_error(path, found) from found


def _be_a_rank(loaded: LoadedConfig, environment: RankEnvironment) -> int:
    from paceline.training.worker import run_worker

    run_worker(loaded, environment)
    return 0
