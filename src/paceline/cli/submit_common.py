"""What every `paceline submit` does: sort its own flags from those of `train`, and judge the ranks of the job."""

from __future__ import annotations

import difflib
import math
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline.errors import UserError
from paceline.launch.job_record import RECORD, JobRecord
from paceline.runs.folder import RunFolder
from paceline.settings.sites import Given, JobSetting, JobSettings, split_words
from paceline.settings.text import check_text

if TYPE_CHECKING:  # the parser behind it takes longer to import than --help may
    from paceline.settings.load import LoadedConfig

_TEXT_WITH_DASHES = ("sbatch",)  # only the text of an #SBATCH line may begin with dashes itself


def list_flags(settings: Mapping[str, JobSetting]) -> str:
    rows = [(f"{s.flag} {s.metavar}".strip(), s.help) for s in settings.values()]
    width = max(len(flag) for flag, _ in rows)
    return "".join(f"  {flag:<{width}}  {text}\n" for flag, text in rows)


def split_flags(arguments: list[str], own: Mapping[str, JobSetting]) -> tuple[JobSettings, list[str]]:
    """Our own flags, and what is left for `train`."""
    typed: dict[str, tuple[str, ...]] = {}
    rest, tokens = [], list(arguments)
    while tokens:
        token = tokens.pop(0)
        name, has_value, value = token.removeprefix("--").partition("=")
        setting = own.get(name.replace("-", "_")) if token.startswith("--") else None
        if setting is None:
            rest.append(token)
            continue
        if setting.kind == "switch":
            if has_value:
                raise UserError(f"{setting.flag} takes no value", got=token, hint=setting.flag)
            value = "true"
        elif not has_value:
            if not tokens or (tokens[0].startswith("--") and setting.name not in _TEXT_WITH_DASHES):
                raise UserError(f"{setting.flag} needs a value", where="the command line", allowed=setting.help)
            value = tokens.pop(0)
        check_text(value, setting.name, where=f"flag {setting.flag}", is_secret=setting.name == "env")
        before = typed.get(setting.name, ()) if setting.kind in ("list", "lines") else ()
        typed[setting.name] = before + split_words(setting, value)
    _refuse_unknown(rest, own)
    return {name: Given(values, f"flag {own[name].flag}") for name, values in typed.items()}, rest


def _refuse_unknown(rest: list[str], own: Mapping[str, JobSetting]) -> None:
    """A misspelt flag of ours; `train` would not know what it resembles."""
    from paceline.settings.fields import find_field

    for token in rest:
        name = token.removeprefix("--").partition("=")[0]
        if not token.startswith("--") or find_field(name) or find_field(name.removeprefix("no-")):
            continue
        close = difflib.get_close_matches(name.replace("-", "_"), own, n=1, cutoff=0.7)
        if close:
            hint = f"perhaps you meant {own[close[0]].flag}"
            raise UserError(f"unknown flag '--{name}'", where="the command line", hint=hint)


def check_ranks(loaded: LoadedConfig, *, nodes: int, ranks_per_node: int, has_gpus: bool) -> None:
    """Device, strategy, batch and lanes must suit the ranks that the job will have."""
    from paceline.settings.rules import check_world

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
    """Whether there is nothing left to do there, said so."""
    from paceline.settings.load import load_config

    status = folder.read_status()
    if status.get("status") != "finished" or not folder.config.is_file():
        return False
    done, asked = load_config(str(folder.config), []).config.train, loaded.config.train
    if loaded.config.run.resume and (done.epochs, done.max_steps) != (asked.epochs, asked.max_steps):
        return False  # it is to go on for longer
    print(f"{folder.path} is finished ({status.get('step')} steps); nothing was submitted")
    return True


def require_writable(folder: Path) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        got = f"{there} is not a folder" if not there.is_dir() else f"{there} is not yours to write"
        raise UserError("the run folder cannot be created", where=str(folder), got=got, hint="--output-dir PATH")


def refuse_second_job(folder: RunFolder, job: str, state: str) -> NoReturn:
    raise UserError(
        "this run has a job already",
        where=str(folder.path),
        got=f"{job}, {state.lower()}",
        hint=f"paceline status {folder.path}, or paceline cancel {folder.path}",
    )


def seconds_to_save(folder: RunFolder) -> tuple[float, int]:
    """Of the run's last save, 0 if there was none; and what a warning must leave for the next one."""
    save_s = float(folder.read_status().get("save_s") or 0.0)
    return save_s, math.ceil(2 * save_s + 10)


def keep_record(record: JobRecord, folder: RunFolder) -> None:
    try:
        record.write(folder.path)
    except OSError as error:  # the job is with the scheduler all the same, and its name must not be lost
        print(f"warning: {RECORD} cannot be written: {error.strerror}; remember job {record.job_id}", file=sys.stderr)


def count_ranks(world_size: int, nodes: int) -> str:
    return f"{world_size} rank{'s' if world_size > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"


def tell_how_to_go_on(folder: RunFolder, files: str) -> None:
    path = shlex.quote(os.path.relpath(folder.path))
    print(f"  folder:  {path} {files}")
    print(f"  follow:  paceline status {path}\n           paceline logs {path} --follow")
    print(f"  stop:    paceline cancel {path}")


def default_threads(loaded: LoadedConfig, *, has_gpus: bool) -> int:
    """CPUs of a rank, when nobody says."""
    parallel, data = loaded.config.parallel, loaded.config.data
    return parallel.omp_num_threads or (1 + data.num_workers if has_gpus else 1)
