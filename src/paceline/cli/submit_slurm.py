"""`paceline submit slurm`: check everything, write job.sbatch, submit it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paceline.cli.command import Command, RecipeSettings
from paceline.errors import EXIT_FINISHED, UserError
from paceline.integrations.slurm.client import read_state, require_sbatch, submit_script
from paceline.integrations.slurm.script import SCRIPT, write_script
from paceline.launch.job import JobSpec, SlurmFlags, parse_job
from paceline.launch.job_record import RECORD, JobRecord, read_record, write_private
from paceline.runs.folder import RunFolder
from paceline.runs.patience import names_in
from paceline.settings.declare import FlagsOf
from paceline.settings.values import Setting

if TYPE_CHECKING:  # imported late: --help must be fast
    from paceline.runs.place import RunPlace
    from paceline.settings.load import LoadedConfig


@dataclass(frozen=True)
class SubmitSlurm(RecipeSettings):
    """Check a recipe and its flags, write the script of a Slurm job into the run folder, and submit it.

    Needs --gpus-per-node or --processes-per-node. Every flag of `paceline train` may be given, except --processes.
    Flags that you use every day can be kept in a profile in ~/.config/paceline/sites.yaml (docs/guides/slurm.md).
    """

    dry_run: bool = False
    """Print the script, submit nothing."""
    job: Annotated[tuple[Setting, ...], FlagsOf(SlurmFlags)] = ()


def submit_slurm(settings: SubmitSlurm) -> int:
    from paceline.integrations.slurm.prepare import check_cluster, complete, with_site
    from paceline.launch.submission import require_inputs, require_writable
    from paceline.runs.place import claimed

    given = with_site(settings.job)
    spec = parse_job(given)
    if not settings.dry_run:
        require_sbatch()
    _check_paths(spec, given)
    loaded = _read_request(settings, spec)
    named = loaded.config.run.output_dir
    # A folder that is given is checked first: `train` would only say that it holds a run.
    if named and _is_over(RunFolder(Path(named)), loaded, asks_slurm=not settings.dry_run):
        return EXIT_FINISHED
    place, spec = _place(loaded, spec)
    folder = RunFolder(spec.folder)
    if not named and _is_over(folder, loaded, asks_slurm=not settings.dry_run):
        return EXIT_FINISHED
    _check_notice(folder, spec)
    require_writable(folder.path)
    spec = complete(spec, loaded, settings.flags)
    if settings.dry_run:
        print(write_script(spec), end="")
        return EXIT_FINISHED
    require_inputs(loaded, brings_own_weights=bool(spec.container_image or spec.environment))
    check_cluster([spec], given)
    with claimed(place) as place:
        folder = RunFolder(place.folder.absolute())
        spec = complete(replace(spec, folder=folder.path), loaded, settings.flags)
        return _submit(spec, folder, ["paceline", "submit", "slurm", *settings.as_arguments(settings.job)])


def _read_request(settings: SubmitSlurm, spec: JobSpec) -> LoadedConfig:
    """Every check that `train` would make in that job."""
    from paceline.launch.request import read_request, require_folder
    from paceline.launch.submission import check_ranks

    loaded = read_request(settings.recipe, settings.flags)
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


def _check_paths(spec: JobSpec, given: Mapping[str, Setting]) -> None:
    """Paths of the job must exist now. Names (of images, of conda environments) cannot be checked."""
    if spec.venv and not (Path(spec.venv).expanduser() / "bin" / "activate").is_file():
        allowed = "a folder made by python -m venv"
        raise UserError("there is no virtual environment", where=given["venv"].where, got=spec.venv, allowed=allowed)
    named = [("conda", "there is no such conda environment", "/")]
    named += [("container_image", "there is no such image", ".sqsh"), ("environment", "there is no such file", ".toml")]
    for name, what, ending in named:
        value = getattr(spec, name)
        is_path = value.startswith(("/", "./", "../", "~")) or value.endswith(ending)
        if value and is_path and not Path(value).expanduser().exists():
            raise UserError(what, where=given[name].where, got=value)


def _check_notice(folder: RunFolder, spec: JobSpec) -> None:
    """The warning must leave enough time to save, if the duration of a save is known."""
    from paceline.launch.submission import seconds_to_save

    save_s, needed_s = seconds_to_save(folder)
    if save_s and 0 < spec.signal_notice_s < needed_s:
        raise UserError(
            "the warning before the time limit leaves too little time to save",
            where="flag --signal-notice-s",
            got=f"{spec.signal_notice_s} s; the last save of this run took {save_s:.1f} s",
            allowed=f"{needed_s} s or more",
            hint=f"--signal-notice-s {needed_s}",
        )


def _is_over(folder: RunFolder, loaded: LoadedConfig, *, asks_slurm: bool) -> bool:
    """Whether the run is finished. A job that still runs or waits is refused."""
    from paceline.launch.submission import is_finished, refuse_second_job

    record = read_record(folder.path) if asks_slurm else None
    if record is not None and record.scheduler == "slurm":
        state = read_state(record.job_id, record.cluster)
        if state.is_active:
            refuse_second_job(folder, f"job {record.job_id}", state.state)
    folder.refuse_if_owned()  # after the job, whose message says more
    return is_finished(folder, loaded)


# --- The job ----------------------------------------------------------------------------------------------------------


def _place(loaded: LoadedConfig, spec: JobSpec) -> tuple[RunPlace, JobSpec]:
    """The folder, as `train` would choose it, and the checkpoint of the first start."""
    from paceline.checkpoints.identity import refuse_early
    from paceline.runs.place import decide_place
    from paceline.settings.schema import flatten

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


def _submit(spec: JobSpec, folder: RunFolder, command: list[str]) -> int:
    from paceline.launch.submission import count_ranks, keep_record, print_next_commands

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
    print_next_commands(folder, f"({SCRIPT}, {RECORD})")
    return EXIT_FINISHED


COMMANDS = (Command("submit slurm", SubmitSlurm, submit_slurm, helps_without_arguments=True, other_names=("sbatch",)),)
