"""`paceline submit slurm RECIPE [flags]`: check everything, write job.sbatch, hand it to the queue."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.submit_common import (
    check_ranks,
    count_ranks,
    default_threads,
    is_finished,
    keep_record,
    list_flags,
    refuse_second_job,
    require_writable,
    seconds_to_save,
    split_flags,
    tell_how_to_go_on,
)
from paceline.errors import EXIT_FINISHED, UserError
from paceline.integrations.slurm.client import read_state, require_sbatch, submit_script
from paceline.integrations.slurm.facts import ask_slurm
from paceline.integrations.slurm.fit import describe_closed, require_possible
from paceline.integrations.slurm.request import as_sbatch_reads
from paceline.integrations.slurm.script import SCRIPT, write_script
from paceline.launch.job import JobSpec, count_gres_gpus, parse_job
from paceline.launch.job_record import RECORD, JobRecord, read_record, write_private
from paceline.runs.folder import RunFolder
from paceline.runs.patience import names_in
from paceline.settings.sites import Given, JobSettings, job_settings, read_site

if TYPE_CHECKING:  # the parser behind it takes longer to import than --help may
    from paceline.runs.place import RunPlace
    from paceline.settings.load import LoadedConfig

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
        print(_ABOUT + list_flags(job_settings()), end="")
        return EXIT_FINISHED
    from paceline.launch.inputs import require_inputs
    from paceline.runs.place import claimed

    typed, train = split_flags(arguments, job_settings())
    settings = with_site(typed)
    spec = parse_job(settings)
    is_dry_run = "dry_run" in typed
    if not is_dry_run:
        require_sbatch()
    _check_paths(spec, settings)
    loaded = _read_train(train, spec)
    given = loaded.config.run.output_dir
    # A folder that was named is looked at first: `train` would only say that it holds a run.
    if given and _is_over(RunFolder(Path(given)), loaded, asks_slurm=not is_dry_run):
        return EXIT_FINISHED
    place, spec = _place(loaded, spec)
    folder = RunFolder(spec.folder)
    if not given and _is_over(folder, loaded, asks_slurm=not is_dry_run):
        return EXIT_FINISHED
    _check_notice(folder, spec)
    require_writable(folder.path)
    spec = complete(spec, loaded, train)
    if is_dry_run:
        print(write_script(spec), end="")
        return EXIT_FINISHED
    require_inputs(loaded, brings_own_weights=bool(spec.container_image or spec.environment))
    check_cluster([spec], settings)
    with claimed(place) as place:
        folder = RunFolder(place.folder.absolute())
        spec = complete(replace(spec, folder=folder.path), loaded, train)
        return _submit(spec, folder, ["paceline", "submit", "slurm", *arguments])


# --- Profile and checks -----------------------------------------------------------------------------------------------


def with_site(typed: JobSettings) -> JobSettings:
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


def _read_train(arguments: list[str], spec: JobSpec) -> LoadedConfig:
    """What `train` would say of its flags in that job, said now."""
    from paceline.launch.request import read_request, require_folder

    loaded = read_request(arguments)
    require_folder(loaded, "a Slurm job")
    run = loaded.config.run
    if spec.array and (run.output_dir or run.resume):
        flag = "output_dir" if run.output_dir else "resume"
        raise UserError(
            "the tasks of an array would share one run folder",
            where=loaded.where(flag),
            got=f"--array {spec.array} with --{flag.replace('_', '-')}",
            hint="leave it out: each task gets a folder of its own",
        )
    check_ranks(loaded, nodes=spec.nodes, ranks_per_node=spec.ranks_per_node, has_gpus=bool(spec.gpus))
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


def check_cluster(specs: Sequence[JobSpec], settings: JobSettings) -> None:
    """Refuse what this cluster can never start. What Slurm does not answer is not judged."""
    facts = ask_slurm()
    where = {name: given.where for name, given in settings.items()}
    for spec in specs:
        request = as_sbatch_reads(spec, os.environ)
        require_possible(request, facts, where)
        if closed := describe_closed(request, facts):
            print(f"warning: {closed}", file=sys.stderr)


def _check_notice(folder: RunFolder, spec: JobSpec) -> None:
    """A run that has saved before knows how long that takes; the warning must leave time for it."""
    save_s, needed_s = seconds_to_save(folder)
    if save_s and 0 < spec.signal_notice_s < needed_s:
        raise UserError(
            "the warning before the time limit leaves too little time to save",
            where="flag --signal-notice",
            got=f"{spec.signal_notice_s} s; the last save of this run took {save_s:.1f} s",
            allowed=f"{needed_s} s or more",
            hint=f"--signal-notice {needed_s}",
        )


def _is_over(folder: RunFolder, loaded: LoadedConfig, *, asks_slurm: bool) -> bool:
    """Whether there is nothing left to do there, said so. A job that still runs or waits is refused."""
    record = read_record(folder.path) if asks_slurm else None
    if record is not None and record.scheduler == "slurm":
        state = read_state(record.job_id, record.cluster)
        if state.is_active:
            refuse_second_job(folder, f"job {record.job_id}", state.state)
    folder.refuse_if_owned()  # after the job, which says more than a process on its node
    return is_finished(folder, loaded)


# --- The job ----------------------------------------------------------------------------------------------------------


def _place(loaded: LoadedConfig, spec: JobSpec) -> tuple[RunPlace, JobSpec]:
    """The folder, as `train` would choose it, and what the first start goes on from."""
    from paceline.checkpoints.identity import refuse_early
    from paceline.runs.place import decide_place
    from paceline.settings.fields import flatten

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
    return place, replace(spec, folder=place.folder.absolute(), resume="" if run.rehearse else resume)


def complete(spec: JobSpec, loaded: LoadedConfig, train: list[str]) -> JobSpec:
    work_dir = Path.cwd()
    threads = default_threads(loaded, has_gpus=bool(spec.gpus))
    mounts = [work_dir]
    for path in (spec.folder, Path(loaded.config.data.data_dir).absolute(), *_folders_of_files(loaded)):
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


def _folders_of_files(loaded: LoadedConfig) -> list[Path]:
    """Of every file that the request names: its recipe, its functions and the weights it starts from."""
    from paceline.settings.code import code_references
    from paceline.settings.recipe_file import RECIPES

    config = loaded.config
    files = [loaded.recipe_path, *(item.path for item in code_references(config) if item.is_file)]
    folders = [path.absolute().parent for path in files if path.absolute().parent != RECIPES]
    for text in (config.model.weights, config.run.init_from, config.run.resume):
        if text and Path(text).exists():
            path = Path(text).absolute()
            folders.append(path if path.is_dir() else path.parent)
    return folders


def _train_arguments(spec: JobSpec, loaded: LoadedConfig, train: list[str]) -> tuple[str, ...]:
    """Recipe and flags, with whatever would not survive a requeue put right."""
    from paceline.runs.trust import TRUST_FLAG
    from paceline.settings.code import code_references
    from paceline.settings.load import parse_flags
    from paceline.settings.recipe_file import shipped_recipes

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
    if loaded.recipe_path.name == "config.yaml" and code_references(loaded.config):
        arguments.append(TRUST_FLAG)  # its code was checked here; a node may not see the key of this machine
    return tuple(arguments)


def _submit(spec: JobSpec, folder: RunFolder, command: list[str]) -> int:
    was_there, was_empty = folder.path.exists(), not names_in(folder.path)
    earlier = read_record(folder.path)
    folder.create()
    script = folder.path / SCRIPT
    write_private(script, write_script(spec))
    try:
        job_id, cluster = submit_script(script, spec)
    except UserError:
        if was_empty:  # leave nothing that looks like a run
            with suppress(OSError):
                for path in (folder.logs, folder.checkpoints):
                    path.rmdir()
                script.unlink()
                if not was_there:
                    folder.path.rmdir()
        raise
    before = [*earlier.earlier, earlier.job_id] if earlier else []
    keep_record(JobRecord(job_id, cluster, str(script), command, array=spec.array, earlier=before), folder)
    print(f"job {job_id} is in the queue: {spec.name}, {count_ranks(spec.world_size, spec.nodes)}")
    tell_how_to_go_on(folder, f"({SCRIPT}, {RECORD})")
    return EXIT_FINISHED
