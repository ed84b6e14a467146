"""`paceline submit kubernetes`: check everything, write job.yaml, submit it."""

from __future__ import annotations

import importlib.util
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paceline.cli.command import Command, RecipeSettings
from paceline.errors import EXIT_FINISHED, UserError
from paceline.integrations.kubernetes.client import Cluster, read_kubernetes_state
from paceline.integrations.kubernetes.job import KubernetesJob, longest_name, parse_kubernetes_job
from paceline.integrations.kubernetes.manifest import MANIFEST, write_manifest
from paceline.integrations.kubernetes.values import DATA_PATH, FILES_PATH, RUNS_PATH, as_name
from paceline.launch.job_record import RECORD, JobRecord, read_record, write_private
from paceline.runs.folder import RUNS, RunFolder
from paceline.runs.patience import names_in
from paceline.settings.declare import FlagsOf
from paceline.settings.values import Setting, latest

if TYPE_CHECKING:  # imported late: --help must be fast
    from paceline.runs.place import RunPlace
    from paceline.settings.load import LoadedConfig

_DEFAULT_GRACE_S = 120
_LONGEST_BACK_OFF_S = 600  # of the Job controller, before it replaces a pod
_LARGEST_FILES_BYTES = 900_000  # an object of the cluster holds a megabyte
_MADE_DATA = ("shapes", "synthetic")  # generated
# Settings that the manifest decides.
_SET_BY_MANIFEST = ("output_dir", "resume", "load_policy", "best_is_latest", "processes", "data_dir")


@dataclass(frozen=True)
class SubmitKubernetes(RecipeSettings):
    """Check a recipe and its flags, write the manifest of a Kubernetes job into the run folder, and submit it.

    Needs --image, --runs, and --gpus-per-node, --gpus or --processes-per-node. Without a client on this machine:
    --dry-run | kubectl apply -f -. Every flag of `paceline train` may be given, except --processes. More:
    docs/guides/kubernetes.md
    """

    dry_run: bool = False
    """Print the manifest, submit nothing."""
    job: Annotated[tuple[Setting, ...], FlagsOf(KubernetesJob)] = ()


def submit_kubernetes(settings: SubmitKubernetes) -> int:
    from paceline.launch.submission import default_threads, is_finished, require_writable
    from paceline.runs.place import claimed

    job = parse_kubernetes_job(latest(settings.job))
    loaded = _read_request(settings, job)
    if job.nodes > 1 and job.start_timeout_s < _LONGEST_BACK_OFF_S:
        print(
            f"warning: --start-timeout-s {job.start_timeout_s} is shorter than the delay before a pod that failed often"
            f" is replaced (up to {_LONGEST_BACK_OFF_S} s); the others would give up",
            file=sys.stderr,
        )
    place = _place(loaded)
    folder = RunFolder(place.folder)
    earlier = None if settings.dry_run else _earlier_job(folder)
    if is_finished(folder, loaded):
        return EXIT_FINISHED
    require_writable(folder.path)
    command = ["paceline", "submit", "kubernetes", *settings.as_arguments(settings.job)]
    job = replace(
        job,
        command=tuple(command),
        grace_s=_grace_s(folder, job),
        cpus=job.cpus or job.ranks_per_node * default_threads(loaded, has_gpus=job.has_gpus),
    )
    named = _with_training(job, loaded, settings, folder, earlier)
    if settings.dry_run:
        print(write_manifest(named), end="")
        return EXIT_FINISHED
    cluster = Cluster(job.context, job.namespace)
    cluster.require()  # before anything is written
    with claimed(place) as place:
        folder = RunFolder(place.folder)
        return _submit(_with_training(job, loaded, settings, folder, earlier), cluster, folder, command, earlier)


# --- Checks -----------------------------------------------------------------------------------------------------------


def _read_request(settings: SubmitKubernetes, job: KubernetesJob) -> LoadedConfig:
    """Every check that `train` would make in the pods and that can be made here."""
    from paceline.launch.request import require_folder
    from paceline.launch.submission import check_ranks
    from paceline.runs.trust import require_trusted_recipe
    from paceline.settings.load import load_config
    from paceline.settings.rules import check_config

    loaded = load_config(settings.recipe, settings.flags)
    check_config(loaded)
    require_trusted_recipe(loaded)
    require_folder(loaded, "a Kubernetes job")
    _check_model_and_data(loaded, job)
    check_ranks(loaded, nodes=job.nodes, ranks_per_node=job.ranks_per_node, has_gpus=job.has_gpus)
    run = loaded.config.run
    if run.resume not in ("", "auto"):
        raise UserError(
            "a job continues in the folder of its own run",
            where=loaded.where("resume"),
            got=run.resume,
            allowed="auto",
            hint=f"--resume auto --output-dir {RUNS / Path(run.resume).name}, or --init-from for the weights alone",
        )
    return loaded


def _check_model_and_data(loaded: LoadedConfig, job: KubernetesJob) -> None:
    """Check names here. Paths must be on a volume, which only the pods can read."""
    from paceline.data.registry import check_data_config, check_dataset_name
    from paceline.launch.request import check_functions
    from paceline.models.external import COLLECTIONS, is_of_collection
    from paceline.models.registry import check_model_name, check_weights

    config = loaded.config
    check_dataset_name(config.data.dataset)
    check_functions(loaded)
    collection = config.model.model_name.partition(":")[0]
    if collection not in COLLECTIONS or importlib.util.find_spec(collection) is not None:
        check_model_name(config.model.model_name)
    if config.data.dataset == "synthetic":
        check_data_config(config.data)
    if config.data.dataset not in _MADE_DATA and loaded.origin("data_dir") == "flag":
        _require_on_volume(loaded, "data_dir", config.data.data_dir, job)
    elif config.data.dataset in ("folder", "csv") and not job.holds(DATA_PATH):
        raise UserError("the folder of pictures is missing", allowed="--data CLAIM, or --data /PATH of every node")
    weights = config.model.weights
    if weights in ("none", "imagenet") or is_of_collection(weights) or "." not in Path(weights).name:
        check_weights(config.model)
    else:
        _require_on_volume(loaded, "weights", config.model.weights, job)
    if config.run.init_from:
        _require_on_volume(loaded, "init_from", config.run.init_from, job)


def _require_on_volume(loaded: LoadedConfig, name: str, path: str, job: KubernetesJob) -> None:
    if not job.holds(path):
        raise UserError(
            "the pods would not find this path",
            where=loaded.where(name),
            got=path,
            allowed="a path below " + " or ".join(volume.path for volume in job.all_volumes),
            hint=f"--data CLAIM, and --{name.replace('_', '-')} {DATA_PATH}/{Path(path).name}",
        )


def _place(loaded: LoadedConfig) -> RunPlace:
    """The local folder, for the manifest. The run is in a folder of the same name in the cluster."""
    from paceline.runs.place import RunPlace, new_place

    given = loaded.config.run.output_dir
    if not given:
        return new_place(loaded)
    path = Path(given)
    if path.exists() and not path.is_dir():
        raise UserError("output_dir is a file", where=loaded.where("output_dir"), got=given)
    return RunPlace(RUNS / path.name if path.is_relative_to(RUNS_PATH) else path, None)


def _earlier_job(folder: RunFolder) -> JobRecord | None:
    """The earlier job of this run, if there was one. One that still waits or runs is refused."""
    from paceline.launch.submission import refuse_second_job

    record = read_record(folder.path)
    if record is None or record.scheduler != "kubernetes":
        return record
    state = read_kubernetes_state(record)
    if state.is_active:
        refuse_second_job(folder, record.job_id, state.state)
    return record


def _job_name(job: KubernetesJob, folder: RunFolder, earlier: JobRecord | None) -> str:
    if job.name != KubernetesJob.name:
        return job.name
    count = len(earlier.earlier) + 1 if earlier else 0
    suffix = f"-{count + 1}" if count else ""
    longest = longest_name(job.api, job.nodes, job.runtime) - len(suffix)
    return (as_name(folder.path.absolute().name, longest) or KubernetesJob.name) + suffix


def _grace_s(folder: RunFolder, job: KubernetesJob) -> int:
    """Enough time to save, from the duration of an earlier save if there was one."""
    from paceline.launch.submission import seconds_to_save

    save_s, needed_s = seconds_to_save(folder)
    if not job.grace_s:
        return max(_DEFAULT_GRACE_S, 2 * needed_s) if save_s else _DEFAULT_GRACE_S
    if save_s and job.grace_s < needed_s:
        raise UserError(
            "the grace period leaves too little time to save",
            where="flag --grace-s",
            got=f"{job.grace_s} s; the last save of this run took {save_s:.1f} s",
            allowed=f"{needed_s} s or more",
            hint=f"--grace-s {needed_s}",
        )
    return job.grace_s


# --- The job ----------------------------------------------------------------------------------------------------------


def _with_training(
    job: KubernetesJob,
    loaded: LoadedConfig,
    settings: SubmitKubernetes,
    folder: RunFolder,
    earlier: JobRecord | None,
) -> KubernetesJob:
    """The job with its name, the arguments of `paceline train` for the pods, and the files that they name."""
    from paceline.settings.recipe_file import shipped_recipes

    files: dict[str, Path] = {}
    recipe = loaded.recipe_path.stem
    if shipped_recipes().get(recipe) != loaded.recipe_path:
        recipe = _take_along(loaded.recipe_path, files, f"{loaded.recipe_name}.yaml")
    flags = {setting.field.name: setting.tokens() for setting in settings.flags}
    flags |= _ship_code(loaded, files)
    arguments = [recipe]
    for name, tokens in flags.items():
        if name not in _SET_BY_MANIFEST:
            arguments += tokens
    arguments += _decided_here(job, loaded, folder)
    name = _job_name(job, folder, earlier)
    return replace(job, name=name, train=tuple(arguments), files=_read_files(files))


def _ship_code(loaded: LoadedConfig, files: dict[str, Path]) -> dict[str, list[str]]:
    """Flags that name the user's functions by the paths in the pods. Modules must be in the image."""
    from paceline.settings.schema import field_table
    from paceline.settings.syntax import code_references

    shipped: dict[str, list[str]] = {}
    for item in code_references(loaded.config):
        place = _take_along(item.path, files) if item.is_file else item.place
        shipped.setdefault(item.field, []).append(f"{place}:{item.function}")
    return {
        name: Setting(field_table()[name], tuple(values), "flag", loaded.where(name)).tokens()
        for name, values in shipped.items()
    }


def _take_along(path: Path, files: dict[str, Path], name: str = "") -> str:
    """The path of a local file in the pods."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", name or path.name)  # allowed in a key of a ConfigMap
    if files.setdefault(name, path).resolve() != path.resolve():
        raise UserError("two files of one name", got=f"{files[name]} and {path}", hint="rename one of them")
    return f"{FILES_PATH}/{name}"


def _decided_here(job: KubernetesJob, loaded: LoadedConfig, folder: RunFolder) -> list[str]:
    """Flags that pods would otherwise compute from their node, which has more than their share."""
    config = loaded.config
    arguments = [f"--processes={job.ranks_per_node}"]
    if loaded.origin("device") == "default":
        arguments.append(f"--device={'cuda' if job.has_gpus else 'cpu'}")
    if not config.parallel.omp_num_threads and not config.parallel.exact:
        arguments.append(f"--omp-num-threads={max(1, job.cpus // job.ranks_per_node)}")
    if config.data.dataset not in _MADE_DATA:
        is_given = job.holds(config.data.data_dir)
        elsewhere = DATA_PATH if job.holds(DATA_PATH) else "/tmp"
        arguments.append(f"--data-dir={config.data.data_dir if is_given else elsewhere}")
    if config.run.load_policy != "fresh":
        arguments.append("--load-policy=fresh")  # a replaced pod continues its own run
    if config.run.best_is_latest:
        arguments.append("--no-best-is-latest")
    arguments.append(f"--output-dir={RUNS_PATH}/{folder.path.absolute().name}")
    if not config.run.rehearse:
        arguments.append("--resume=auto")
    return arguments


def _read_files(files: dict[str, Path]) -> tuple[tuple[str, str], ...]:
    texts = []
    for name, path in sorted(files.items()):
        try:
            texts.append((name, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            raise UserError("this file is not text", where=str(path), got=error.reason) from error
    if sum(len(text.encode()) for _, text in texts) > _LARGEST_FILES_BYTES:
        raise UserError(
            "these files are too large for the manifest",
            got=", ".join(str(path) for path in files.values()),
            allowed=f"{_LARGEST_FILES_BYTES:,} bytes in all",
            hint="put them into the image, or onto a volume",
        )
    return tuple(texts)


def _submit(
    job: KubernetesJob, cluster: Cluster, folder: RunFolder, command: list[str], earlier: JobRecord | None
) -> int:
    from paceline.launch.submission import count_ranks, keep_record, print_next_commands

    was_empty = not names_in(folder.path)
    new_folders = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    folder.path.mkdir(parents=True, exist_ok=True)
    manifest = folder.path / MANIFEST
    write_private(manifest, write_manifest(job))
    try:
        cluster.create(job)
    except BaseException:  # refused, unreachable or interrupted: a run folder would look like a run
        if was_empty:
            with suppress(OSError):
                manifest.unlink()
                for path in new_folders:
                    path.rmdir()
        raise
    record = JobRecord(
        job_id=job.name,
        cluster=job.context,
        script=str(manifest),
        command=command,
        scheduler="kubernetes",
        namespace=cluster.namespace,
        api=job.api,
        earlier=[*earlier.earlier, earlier.job_id] if earlier else [],
    )
    keep_record(record, folder)
    print(f"{job.api} {job.name} is in namespace {cluster.namespace}: {count_ranks(job.world_size, job.nodes)}")
    print_next_commands(folder, f"({MANIFEST}, {RECORD}); in the pods {RUNS_PATH}/{folder.path.absolute().name}")
    return EXIT_FINISHED


COMMANDS = (
    Command(
        "submit kubernetes",
        SubmitKubernetes,
        submit_kubernetes,
        helps_without_arguments=True,
        other_names=("k8s", "kube"),
    ),
)
