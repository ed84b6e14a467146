"""`paceline submit slurm RECIPE [flags]`: check everything, write job.sbatch, hand it to the queue."""

from __future__ import annotations

import difflib
import math
import os
import shlex
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config.sites import Given, JobSettings, job_settings, read_site, split_words
from paceline.errors import EXIT_FINISHED, UserError
from paceline.launch.job import RECORD, JobRecord, JobSpec, count_gres_gpus, parse_job, read_record
from paceline.launch.slurm import SCRIPT, read_state, require_sbatch, submit_script, write_script
from paceline.runs.folder import RunFolder, write_atomically

if TYPE_CHECKING:  # the parser behind it takes longer to import than --help may
    from paceline.config.load import LoadedConfig

_ABOUT = """\
usage: paceline submit slurm RECIPE [flags]

Check a recipe and its flags, write the script of a Slurm job into the run folder, and submit it.
Needs --gpus-per-node or --processes-per-node. Every flag of `paceline train` may be given, but --processes.
What you would type every day goes into a profile in ~/.config/paceline/sites.yaml (docs/guides/slurm.md).

"""
_SOFTWARE = ("container_image", "environment", "venv", "conda")
_RANKS = ("gpus_per_node", "processes_per_node")
# Decided by the script itself, so not handed on as typed.
_TAKEN = ("output_dir", "resume", "load_policy", "best_is_latest", "processes")


def run(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_help(), end="")
        return EXIT_FINISHED
    if arguments[0] != "slurm":
        hint = shlex.join(["paceline", "submit", "slurm", *arguments])
        raise UserError("submit to which scheduler?", got=arguments[0], allowed="slurm", hint=hint)
    typed, train = _split(arguments[1:])
    settings = _with_site(typed)
    spec = parse_job(settings)
    is_dry_run = "dry_run" in typed
    if not is_dry_run:
        require_sbatch()
    _check_paths(spec, settings)
    loaded = _read_train(train, spec)
    given = loaded.config.run.output_dir
    # A folder that was named is looked at first: `train` would only say that it holds a run.
    if given and _is_finished(RunFolder(Path(given)), loaded, asks_slurm=not is_dry_run):
        return EXIT_FINISHED
    folder, spec = _place(loaded, spec)
    if not given and _is_finished(folder, loaded, asks_slurm=not is_dry_run):
        return EXIT_FINISHED
    _check_notice(folder, spec)
    _require_writable(folder.path)
    spec = _complete(spec, loaded, train)
    if is_dry_run:
        print(write_script(spec), end="")
        return EXIT_FINISHED
    return _submit(spec, folder, ["paceline", "submit", *arguments])


def _help() -> str:
    rows = [(f"{s.flag} {s.metavar}".strip(), s.help) for s in job_settings().values()]
    width = max(len(flag) for flag, _ in rows)
    return _ABOUT + "".join(f"  {flag:<{width}}  {text}\n" for flag, text in rows)


# --- Flags and profile ------------------------------------------------------------------------------------------------


def _split(arguments: list[str]) -> tuple[JobSettings, list[str]]:
    """Our own flags, and what is left for `train`."""
    own = job_settings()
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
            # Only the text of an #SBATCH line may begin with dashes itself.
            if not tokens or (tokens[0].startswith("--") and setting.name != "sbatch"):
                raise UserError(f"{setting.flag} needs a value", where="the command line", allowed=setting.help)
            value = tokens.pop(0)
        before = typed.get(setting.name, ()) if setting.kind in ("list", "lines") else ()
        typed[setting.name] = before + split_words(setting, value)
    _refuse_unknown(rest)
    return {name: Given(values, f"flag {own[name].flag}") for name, values in typed.items()}, rest


def _refuse_unknown(rest: list[str]) -> None:
    """A misspelt flag of ours; `train` would not know what it resembles."""
    from paceline.config.fields import find_field

    for token in rest:
        name = token.removeprefix("--").partition("=")[0]
        if not token.startswith("--") or find_field(name) or find_field(name.removeprefix("no-")):
            continue
        close = difflib.get_close_matches(name.replace("-", "_"), job_settings(), n=1, cutoff=0.7)
        if close:
            hint = f"perhaps you meant {job_settings()[close[0]].flag}"
            raise UserError(f"unknown flag '--{name}'", where="the command line", hint=hint)


def _with_site(typed: JobSettings) -> JobSettings:
    """A profile stands below the flags: a flag replaces what it contradicts, and adds to lists of lines."""
    name = typed["site"].values[-1] if "site" in typed else None
    site = {} if name == "" else dict(read_site(name))
    for group in (_SOFTWARE, _RANKS):
        if any(member in typed for member in group):
            site = {key: given for key, given in site.items() if key not in group}
    if any(member in typed for member in _RANKS) and "gres" in site and count_gres_gpus(site["gres"].values[-1]):
        del site["gres"]
    merged = {**site, **typed}
    for key in ("env", "sbatch"):
        if key in site and key in typed:
            merged[key] = Given(site[key].values + typed[key].values, f"{site[key].where} and {typed[key].where}")
    return merged


# --- Checks -----------------------------------------------------------------------------------------------------------


def _read_train(arguments: list[str], spec: JobSpec) -> LoadedConfig:
    """What `train` would say of its flags in that job, said now."""
    from paceline.cli.request import read_request
    from paceline.config.rules import check_world

    loaded = read_request(arguments)
    parallel, run = loaded.config.parallel, loaded.config.run
    if loaded.origin("processes") == "flag":
        hint = f"--nodes {spec.nodes} --processes-per-node {parallel.processes}"
        raise UserError("a job's ranks are given per node", where=loaded.where("processes"), hint=hint)
    if parallel.device != "auto" and (parallel.device == "cuda") != bool(spec.gpus):
        asked = f"{spec.ranks_per_node} " + ("GPUs" if spec.gpus else "processes") + " per node"
        hint = "leave --device out" if spec.gpus else f"--gpus-per-node {spec.ranks_per_node}"
        got = f"--device {parallel.device}, {asked}"
        raise UserError("device and nodes contradict each other", where=loaded.where("device"), got=got, hint=hint)
    if parallel.strategy == "single" and spec.world_size > 1:
        got = f"{spec.nodes} nodes x {spec.ranks_per_node} ranks"
        raise UserError("strategy single runs on one process", where=loaded.where("strategy"), got=got)
    if spec.array and (run.output_dir or run.resume):
        flag = "output_dir" if run.output_dir else "resume"
        raise UserError(
            "the tasks of an array would share one run folder",
            where=loaded.where(flag),
            got=f"--array {spec.array} with --{flag.replace('_', '-')}",
            hint="leave it out: each task gets a folder of its own",
        )
    try:
        check_world(loaded, spec.world_size)
    except UserError as error:
        hint = (error.hint or "").replace("--processes", "nodes x ranks per node of")
        raise UserError(
            error.what, where=error.where, got=error.got, allowed=error.allowed, hint=hint or None
        ) from error
    return loaded


def _check_paths(spec: JobSpec, settings: JobSettings) -> None:
    """What the job will look for must be there now. Names (of images, of conda environments) cannot be looked up."""
    if spec.venv and not (Path(spec.venv).expanduser() / "bin" / "activate").is_file():
        allowed = "a folder made by python -m venv"
        raise UserError("there is no virtual environment", where=settings["venv"].where, got=spec.venv, allowed=allowed)
    named = [("conda", "there is no such conda environment", "/")]
    named += [("container_image", "there is no such image", ".sqsh"), ("environment", "there is no such file", ".toml")]
    for name, what, ending in named:
        value = getattr(spec, name)
        is_path = value.startswith(("/", "./", "../", "~")) or value.endswith(ending)
        if value and is_path and not Path(value).expanduser().exists():
            raise UserError(what, where=settings[name].where, got=value)


def _check_notice(folder: RunFolder, spec: JobSpec) -> None:
    """A run that has saved before knows how long that takes; the warning must leave time for it."""
    save_s = float(folder.read_status().get("save_s") or 0.0)
    needed_s = math.ceil(2 * save_s + 10)
    if save_s and 0 < spec.signal_notice_s < needed_s:
        raise UserError(
            "the warning before the time limit leaves too little time to save",
            where="flag --signal-notice",
            got=f"{spec.signal_notice_s} s; the last save of this run took {save_s:.1f} s",
            allowed=f"{needed_s} s or more",
            hint=f"--signal-notice {needed_s}",
        )


def _require_writable(folder: Path) -> None:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        got = f"{there} is not a folder" if not there.is_dir() else f"{there} is not yours to write"
        raise UserError("the run folder cannot be created", where=str(folder), got=got, hint="--output-dir PATH")


def _is_finished(folder: RunFolder, loaded: LoadedConfig, *, asks_slurm: bool) -> bool:
    """Whether there is nothing left to do there, said so. A job that still runs or waits is refused."""
    from paceline.config.load import load_config

    folder.refuse_if_owned()
    record = read_record(folder.path) if asks_slurm else None
    if record is not None:
        state = read_state(record.job_id, record.cluster)
        if state.is_active:
            raise UserError(
                "this run has a job already",
                where=str(folder.path),
                got=f"job {record.job_id}, {state.state.lower()}",
                hint=f"paceline status {folder.path}, or paceline cancel {folder.path}",
            )
    status = folder.read_status()
    if status.get("status") != "finished" or not folder.config.is_file():
        return False
    done, asked = load_config(str(folder.config), []).config.train, loaded.config.train
    if loaded.config.run.resume and (done.epochs, done.max_steps) != (asked.epochs, asked.max_steps):
        return False  # it is to go on for longer
    print(f"{folder.path} is finished ({status.get('step')} steps); nothing was submitted")
    return True


# --- The job ----------------------------------------------------------------------------------------------------------


def _place(loaded: LoadedConfig, spec: JobSpec) -> tuple[RunFolder, JobSpec]:
    """The folder, as `train` would choose it, and what the first start goes on from."""
    from paceline.checkpoints.identity import refuse_early
    from paceline.config.fields import flatten
    from paceline.runs.place import decide_place

    run = loaded.config.run
    place = decide_place(loaded)
    resume = "auto"
    if place.resume_from is not None:
        refuse_early(place.resume_from, flatten(loaded.config), prefer_best=run.best_is_latest)
        best = place.resume_from / "checkpoints" / "best"
        if run.best_is_latest and best.exists():
            resume = str(best.absolute())
        elif run.resume != "auto" and place.resume_from.resolve() != place.folder.resolve():
            resume = str(place.resume_from.absolute())
    folder = RunFolder(place.folder.absolute())
    return folder, replace(spec, folder=folder.path, resume="" if run.rehearse else resume)


def _complete(spec: JobSpec, loaded: LoadedConfig, train: list[str]) -> JobSpec:
    work_dir = Path.cwd()
    threads = loaded.config.parallel.omp_num_threads or (1 + loaded.config.data.num_workers if spec.gpus else 1)
    mounts = [work_dir]
    for path in (spec.folder, Path(loaded.config.data.data_dir).absolute()):
        if not any(path.is_relative_to(mounted) for mounted in mounts):
            mounts.append(path)
    has_own_python = any(getattr(spec, name) for name in _SOFTWARE)
    return replace(
        spec,
        name=loaded.recipe_name if spec.name == JobSpec.name else spec.name,
        work_dir=work_dir,
        train=_train_arguments(spec, loaded, train),
        python="python" if has_own_python else sys.executable,
        cpus_per_task=spec.cpus_per_task or spec.default_cpus(threads),
        container_mounts=tuple(f"{path}:{path}" for path in mounts),
        venv=str(Path(spec.venv).expanduser().absolute()) if spec.venv else "",
    )


def _train_arguments(spec: JobSpec, loaded: LoadedConfig, train: list[str]) -> tuple[str, ...]:
    """Recipe and flags, with whatever would not survive a requeue put right."""
    from paceline.config.load import parse_flags
    from paceline.config.recipe_file import shipped_recipes

    has_recipe = bool(train) and not train[0].startswith("-")
    is_shipped = shipped_recipes().get(loaded.recipe_path.stem) == loaded.recipe_path
    recipe = loaded.recipe_path.stem if is_shipped else str(loaded.recipe_path.absolute())
    flags = {setting.field.name: setting for setting in parse_flags(train[1:] if has_recipe else train)}
    arguments = [recipe]
    for name, setting in flags.items():
        if name not in _TAKEN:
            arguments += setting.tokens()
    run = loaded.config.run
    if run.load_policy != "fresh":
        # Back from the queue a run goes on with its own checkpoints, whatever it may have taken at first.
        keeps = run.load_policy == "eager" and run.resume == "auto"
        arguments.append(f"--load-policy={'eager' if keeps else 'fresh'}")
    if run.best_is_latest:
        arguments.append("--no-best-is-latest")
    if loaded.origin("processes") == "file" and spec.start != "agent":
        arguments.append("--processes=0")  # the tasks decide, not the recipe
    return tuple(arguments)


def _submit(spec: JobSpec, folder: RunFolder, command: list[str]) -> int:
    is_new = not folder.path.exists()
    earlier = read_record(folder.path)
    folder.create()
    script = folder.path / SCRIPT
    write_atomically(script, write_script(spec))
    try:
        job_id, cluster = submit_script(script)
    except UserError:
        if is_new:
            _remove_empty(folder)
        raise
    before = [*earlier.earlier, earlier.job_id] if earlier else []
    try:
        JobRecord(job_id, cluster, str(script), command, array=spec.array, earlier=before).write(folder.path)
    except OSError as error:  # the job is in the queue all the same, and its id must not be lost
        print(f"warning: {RECORD} cannot be written: {error.strerror}; remember job {job_id}", file=sys.stderr)
    ranks = f"{spec.world_size} rank" + ("s" if spec.world_size > 1 else "")
    nodes = f"{spec.nodes} node" + ("s" if spec.nodes > 1 else "")
    path = shlex.quote(os.path.relpath(folder.path))
    print(f"job {job_id} is in the queue: {spec.name}, {ranks} on {nodes}")
    print(f"  folder:  {path} ({SCRIPT}, {RECORD})")
    print(f"  follow:  paceline status {path}\n           paceline logs {path} --follow")
    print(f"  stop:    paceline cancel {path}")
    return EXIT_FINISHED


def _remove_empty(folder: RunFolder) -> None:
    """Nothing was submitted: leave no folder that looks like a run."""
    with suppress(OSError):
        (folder.path / SCRIPT).unlink()
        for path in (folder.logs, folder.checkpoints, folder.path):
            path.rmdir()
