"""The flags of `paceline submit kubernetes`, judged before anything starts: each value, and what contradicts what."""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import PurePosixPath

from paceline.config.sites import JobSetting, JobSettings, check_given
from paceline.errors import UserError, printable_line
from paceline.launch.job import parse_time_s
from paceline.launch.job_record import SECRET_PREFIX
from paceline.launch.kubernetes_job import (
    APIS,
    DATA_PATH,
    FILES_PATH,
    RUNS_PATH,
    Api,
    KubernetesJob,
    Toleration,
    Volume,
    as_name,
    longest_name,
)
from paceline.world.secret import RUN_SECRET

_OWN_PATHS = ("/tmp", "/dev/shm", FILES_PATH)
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_SERVICE = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # the job's Service has its name
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(SECRET_PREFIX + r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9._-]{1,253}")
_VARIABLE_FORMS = "NAME=VALUE, or NAME=secret:SECRET/KEY for a key of a Secret in the namespace"
_QUANTITY = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[KMGTP]i|[kMGTP])?")
_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BYTES |= {f"{unit}i": 1024 ** (power + 1) for power, unit in enumerate("KMGTP")}
_IMAGE = re.compile(
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?/)?(?P<path>[a-z0-9]+([._/-]+[a-z0-9]+)*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(@sha256:(?P<digest>[0-9a-f]{64}))?"
)
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_OWN_VARIABLES = ("RANK", "WORLD_SIZE", "PACELINE_NODES", "PACELINE_NODE", "PACELINE_MEET", RUN_SECRET)


@cache
def kubernetes_settings() -> dict[str, JobSetting]:
    """Every flag of its own by name, in the order of `--help`."""
    settings = [
        JobSetting("image", "IMAGE", "container image with paceline in it, with a tag or a digest"),
        JobSetting("nodes", "N", "pods, one to a node (1)", "number"),
        JobSetting("gpus_per_node", "N", "GPUs, and ranks, of each pod", "number"),
        JobSetting("gpus", "N", "GPUs in all, instead of per node", "number"),
        JobSetting("processes_per_node", "N", "ranks of each pod, on CPUs", "number"),
        JobSetting(
            "runs", "CLAIM", f"where runs are kept: a PersistentVolumeClaim or /PATH of all nodes; at {RUNS_PATH}"
        ),
        JobSetting("data", "CLAIM", f"where data lies: a PersistentVolumeClaim or /PATH of all nodes; at {DATA_PATH}"),
        JobSetting("mount", "CLAIM:PATH", "one more volume, CLAIM or /PATH, optionally :ro; may be repeated", "lines"),
        JobSetting("api", "KIND", "job (needs no operator), jobset, or trainjob (Kubeflow Trainer v2)"),
        JobSetting("runtime", "NAME", "training runtime of a trainjob (torch-distributed)"),
        JobSetting("cpus", "N", "CPUs of each pod (one per CPU rank; more for GPUs with --num-workers)", "number"),
        JobSetting("memory", "SIZE", "memory of each pod, as 64Gi (4Gi per CPU rank, 16Gi per GPU)"),
        JobSetting("shm", "SIZE", "/dev/shm of each pod, out of its memory (1Gi; 8Gi with GPUs)"),
        JobSetting("gpu_resource", "NAME", "what the cluster calls a GPU (nvidia.com/gpu)"),
        JobSetting("time", "LIMIT", "the job is ended after: MINUTES, HH:MM:SS or D-HH:MM:SS"),
        JobSetting("grace", "S", "seconds to save after SIGTERM (measured by an earlier save, else 120)", "number"),
        JobSetting("start_timeout", "S", "seconds pods wait until all of them are there (900)", "number"),
        JobSetting("retries", "N", "pods replaced after failures of their own; lost nodes do not count (3)", "number"),
        JobSetting("namespace", "NAME", "namespace (the kubeconfig's)"),
        JobSetting("context", "NAME", "context of the kubeconfig (its current one)"),
        JobSetting("queue", "NAME", "Kueue's local queue: the job waits there, suspended"),
        JobSetting("priority_class", "NAME", "priority class of the pods"),
        JobSetting("service_account", "NAME", "service account of the pods; they get no token"),
        JobSetting("image_pull_secret", "NAME", "secret for the image's registry; may be repeated", "list"),
        JobSetting("secret", "NAME", "secret whose keys become variables; may be repeated", "list"),
        JobSetting(
            "env",
            "NAME=VALUE",
            "variable of the pods; NAME=secret:SECRET/KEY refers to a Secret; may be repeated",
            "lines",
        ),
        JobSetting("node_selector", "KEY=VALUE", "label a node must have; may be repeated", "lines"),
        JobSetting("toleration", "KEY[=VALUE][:EFFECT]", "taint to bear; may be repeated", "lines"),
        JobSetting("user", "UID[:GID]", "who the pods are; never root (10001)"),
        JobSetting("port", "N", "where pods meet (29400)", "number"),
        JobSetting("job_name", "NAME", "name in the cluster (the run folder's)"),
        JobSetting("dry_run", "", "print the manifest, submit nothing", "switch"),
    ]
    return {setting.name: setting for setting in settings}


def parse_kubernetes_job(settings: JobSettings) -> KubernetesJob:
    """The cluster's part of a job. Every value, and what contradicts what, is judged here."""
    check_given(settings)
    nodes = _number(settings, "nodes", 1, low=1, high=10_000)
    ranks, has_gpus = _parse_ranks(settings, nodes)
    api, runtime = _parse_api(settings), _name(settings, "runtime", dots=True) or KubernetesJob.runtime
    user, group = _parse_user(settings)
    job = KubernetesJob(
        image=_parse_image(settings),
        runs=_parse_runs(settings),
        name=_parse_job_name(settings, longest_name(api, nodes, runtime)),
        nodes=nodes,
        ranks_per_node=ranks,
        has_gpus=has_gpus,
        gpu_resource=_parse_key(settings, "gpu_resource", KubernetesJob.gpu_resource),
        volumes=_parse_volumes(settings),
        api=api,
        runtime=runtime,
        cpus=_number(settings, "cpus", 0, low=1, high=10_000),
        memory=_parse_size(settings, "memory") or f"{ranks * (16 if has_gpus else 4)}Gi",
        shm=_parse_size(settings, "shm") or ("8Gi" if has_gpus else "1Gi"),
        limit_s=parse_time_s(_text(settings, "time"), settings["time"].where) if "time" in settings else 0,
        grace_s=_number(settings, "grace", 0, low=1, high=86_400),
        start_timeout_s=_number(settings, "start_timeout", KubernetesJob.start_timeout_s, low=10, high=604_800),
        retries=_number(settings, "retries", KubernetesJob.retries, high=1000),
        namespace=_name(settings, "namespace"),
        context=_text(settings, "context"),
        queue=_name(settings, "queue", dots=True),
        priority_class=_name(settings, "priority_class", dots=True),
        service_account=_name(settings, "service_account", dots=True),
        image_pull_secrets=_names(settings, "image_pull_secret"),
        secrets=_names(settings, "secret"),
        env=tuple(_parse_variable(text, settings) for text in _values(settings, "env")),
        node_selector=tuple(_parse_selector(text, settings) for text in _values(settings, "node_selector")),
        tolerations=tuple(_parse_toleration(text, settings) for text in _values(settings, "toleration")),
        user=user,
        group=group,
        port=_number(settings, "port", KubernetesJob.port, low=1024, high=65_535),
    )
    _check_together(job, settings)
    return job


def _in_bytes(quantity: str) -> float:
    match = _QUANTITY.fullmatch(quantity)
    assert match is not None, quantity
    return float(match["number"]) * _BYTES[match["unit"] or ""]


# --- One value --------------------------------------------------------------------------------------------------------


def _values(settings: JobSettings, name: str) -> tuple[str, ...]:
    return settings[name].values if name in settings else ()


def _text(settings: JobSettings, name: str) -> str:
    if name not in settings:
        return ""
    value = settings[name].values[-1]
    if not value or not value.isprintable() or " " in value:
        raise _invalid(settings, name, value, "text without spaces")
    return value


def _invalid(settings: JobSettings, name: str, value: str, allowed: str, hint: str | None = None) -> UserError:
    return UserError(f"{name}: {value!r} is not valid", where=settings[name].where, allowed=allowed, hint=hint)


def _number(settings: JobSettings, name: str, default: int, *, low: int = 0, high: int = 1_000_000) -> int:
    if name not in settings:
        return default
    text = settings[name].values[-1]
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        raise _invalid(settings, name, text, f"a whole number from {low} to {high:,}")
    return int(text)


def _name(settings: JobSettings, name: str, *, dots: bool = False) -> str:
    text = _text(settings, name)
    return _require_name(settings, name, text, dots=dots, longest=253 if dots else 63) if text else ""


def _parse_job_name(settings: JobSettings, longest: int) -> str:
    text = _text(settings, "job_name") or KubernetesJob.name
    if not _SERVICE.fullmatch(text) or len(text) > longest:
        allowed = f"small letters, digits and dashes, a letter first, up to {longest}: the cluster adds to it"
        raise _invalid(settings, "job_name", text, allowed, f"--job-name {as_name(text, longest) or 'my-job'}")
    return text


def _names(settings: JobSettings, name: str) -> tuple[str, ...]:
    return tuple(_require_name(settings, name, text, dots=True, longest=253) for text in _values(settings, name))


def _require_name(settings: JobSettings, name: str, text: str, *, dots: bool, longest: int) -> str:
    if (_SUBDOMAIN if dots else _LABEL).fullmatch(text) and len(text) <= longest:
        return text
    letters = "small letters, digits and dashes" + (" and dots" if dots else "")
    allowed = f"{letters}, a letter or digit at both ends, up to {longest}"
    better = as_name(text)
    flag = kubernetes_settings()[name].flag
    raise _invalid(settings, name, text, allowed, f"{flag} {better}" if better else None)


def _parse_image(settings: JobSettings) -> str:
    if "image" not in settings:
        raise UserError(
            "which image do the pods run?",
            allowed="--image NAME:TAG, an image with paceline in it",
            hint="docker build --tag REGISTRY/paceline:0.1.0 . && docker push REGISTRY/paceline:0.1.0",
        )
    text = _text(settings, "image")
    match = _IMAGE.fullmatch(text)
    if match is None:
        small = text.lower() if _IMAGE.fullmatch(text.lower()) else ""
        allowed = "[REGISTRY/]NAME:TAG or NAME@sha256:DIGEST, in small letters"
        raise _invalid(settings, "image", text, allowed, f"--image {small}" if small else None)
    if not match["digest"] and match["tag"] in (None, "latest"):
        raise UserError(
            "this image may be another one tomorrow",
            where=settings["image"].where,
            got=text,
            allowed="a tag other than latest, or a digest: a pod that comes back must run what the others run",
            hint=f"--image {text.removesuffix(':latest')}:0.1.0",
        )
    return text


def _parse_api(settings: JobSettings) -> Api:
    text = _text(settings, "api") or "job"
    for api in APIS:
        if text.lower() == api:
            return api
    close = difflib.get_close_matches(text.lower(), APIS, n=1)
    raise _invalid(settings, "api", text, ", ".join(APIS), f"--api {close[0]}" if close else None)


def _parse_size(settings: JobSettings, name: str) -> str:
    text = _text(settings, name)
    if not text:
        return ""
    match = _QUANTITY.fullmatch(text)
    if match is None or not match["unit"] or float(match["number"]) == 0:
        number = re.match(r"[0-9]+(\.[0-9]+)?", text)
        unit = re.sub(r"[^KMGTP]", "", text.upper())[:1] or "G"
        hint = f"{kubernetes_settings()[name].flag} {number[0]}{unit}i" if number and float(number[0]) else None
        raise _invalid(settings, name, text, "a number with Mi, Gi or Ti (or M, G, T), as 64Gi", hint)
    return text


def _parse_key(settings: JobSettings, name: str, default: str) -> str:
    text = _text(settings, name) or default
    if not _KEY.fullmatch(text):
        raise _invalid(settings, name, text, "such as nvidia.com/gpu")
    return text


def _parse_variable(text: str, settings: JobSettings) -> tuple[str, str]:
    """A name and a value, or a name and `secret:SECRET/KEY`. Error screens do not repeat values."""
    name, is_set, value = text.partition("=")
    where = settings["env"].where
    is_secret = value.startswith(SECRET_PREFIX)
    if not is_set or not _VARIABLE.fullmatch(name) or (is_secret and not _SECRET.fullmatch(value)):
        raise UserError("this is not a variable", where=where, got=printable_line(name), allowed=_VARIABLE_FORMS)
    if name in _OWN_VARIABLES or name.startswith(("SLURM_", "PET_")):
        raise UserError(f"{name} belongs to the launcher", where=where, got=name, hint="leave it out")
    return name, value


def _parse_selector(text: str, settings: JobSettings) -> tuple[str, str]:
    key, is_set, value = text.partition("=")
    if not is_set or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
        raise _invalid(settings, "node_selector", text, "KEY=VALUE of a node's label, as accelerator=h100")
    return key, value


def _parse_toleration(text: str, settings: JobSettings) -> Toleration:
    rest, has_effect, effect = text.partition(":")
    key, _, value = rest.partition("=")
    if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value) or (has_effect and effect not in _EFFECTS):
        close = difflib.get_close_matches(effect, _EFFECTS, n=1)
        hint = f"--toleration {rest}:{close[0]}" if close else None
        raise _invalid(settings, "toleration", text, f"KEY, KEY=VALUE, either with :{', :'.join(_EFFECTS)}", hint)
    return Toleration(key, value, effect)


def _parse_user(settings: JobSettings) -> tuple[int, int]:
    text = _text(settings, "user") or "10001"
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if match is None or int(match[1]) == 0:
        raise _invalid(settings, "user", text, "UID or UID:GID, numbers; not 0: pods do not run as root")
    return int(match[1]), int(match[2] or match[1])


# --- Volumes ----------------------------------------------------------------------------------------------------------


def _parse_runs(settings: JobSettings) -> Volume:
    if "runs" not in settings:
        raise UserError(
            "where are runs kept?",
            allowed="--runs CLAIM, a PersistentVolumeClaim that all pods can write; or --runs /PATH of every node",
            hint="kubectl get pvc lists claims; examples/kubernetes/storage.yaml makes one",
        )
    return Volume(_source(settings, "runs", _text(settings, "runs")), RUNS_PATH)


def _parse_volumes(settings: JobSettings) -> tuple[Volume, ...]:
    volumes = []
    if "data" in settings:
        volumes.append(Volume(_source(settings, "data", _text(settings, "data")), DATA_PATH))
    volumes += [_parse_mount(text, settings) for text in _values(settings, "mount")]
    taken = [RUNS_PATH, *_OWN_PATHS]
    for volume in volumes:
        around = next((path for path in taken if _overlap(volume.path, path)), None)
        if around is not None:
            where = settings["mount"].where
            raise UserError("two volumes at one place", where=where, got=f"{volume.path} and {around}")
        taken.append(volume.path)
    return tuple(volumes)


def _parse_mount(text: str, settings: JobSettings) -> Volume:
    source, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    if not source or not path or mode not in ("", "ro", "rw"):
        raise _invalid(settings, "mount", text, "CLAIM:/PATH or /PATH_OF_NODE:/PATH, optionally with :ro")
    if not path.startswith("/") or path.rstrip("/") == "" or ".." in path.split("/") or ":" in path:
        hint = f"--mount {source}:/{path.strip('/.')}" if path.strip("/.") else None
        raise _invalid(settings, "mount", text, "an absolute path below /, without ..", hint)
    return Volume(_source(settings, "mount", source), path.rstrip("/"), mode == "ro")


def _source(settings: JobSettings, name: str, text: str) -> str:
    """A claim's name, or an absolute path of the nodes."""
    if not text.startswith("/"):
        if "/" in text:
            raise _invalid(
                settings, name, text, "the name of a PersistentVolumeClaim, or an absolute path of all nodes"
            )
        return _require_name(settings, name, text, dots=True, longest=253)
    if ".." in text.split("/"):
        raise _invalid(settings, name, text, "an absolute path without ..")
    return text.rstrip("/") or "/"


def _overlap(one: str, other: str) -> bool:
    first, second = PurePosixPath(one), PurePosixPath(other)
    return first.is_relative_to(second) or second.is_relative_to(first)


# --- Several together -------------------------------------------------------------------------------------------------


def _parse_ranks(settings: JobSettings, nodes: int) -> tuple[int, bool]:
    """Ranks of each pod, and whether they have GPUs."""
    given = [name for name in ("gpus_per_node", "gpus", "processes_per_node") if name in settings]
    if len(given) != 1:
        flags = [f"{kubernetes_settings()[name].flag} {settings[name].values[-1]}" for name in given]
        raise UserError(
            "ranks are given twice" if given else "how many ranks has a pod?",
            got=" and ".join(flags) or None,
            allowed="one of --gpus-per-node N, --gpus N in all, or --processes-per-node N on CPUs",
            hint="kubectl describe nodes lists CPUs and GPUs" if not given else None,
        )
    if given == ["gpus"]:
        gpus = _number(settings, "gpus", 0, low=1)
        if gpus % nodes:
            near = sorted({max(nodes, gpus - gpus % nodes), gpus - gpus % nodes + nodes})
            raise UserError(
                f"{gpus} GPUs cannot be shared equally by {nodes} nodes",
                where=settings["gpus"].where,
                allowed=f"a multiple of {nodes}",
                hint=f"--gpus {' or '.join(map(str, near))}",
            )
        return gpus // nodes, True
    return _number(settings, given[0], 0, low=1, high=1024), given == ["gpus_per_node"]


def _check_together(job: KubernetesJob, settings: JobSettings) -> None:
    if _in_bytes(job.shm) >= _in_bytes(job.memory):
        where = settings["shm" if "shm" in settings else "memory"].where
        got = f"{job.shm} of {job.memory}"
        raise UserError("/dev/shm would take all memory of the pod", where=where, got=got, hint="a larger --memory")
    if job.cpus and job.cpus < job.ranks_per_node:
        raise UserError(
            "more ranks than CPUs in a pod",
            where=settings["cpus"].where,
            got=f"{job.ranks_per_node} ranks on {job.cpus} CPUs",
            hint=f"--cpus {job.ranks_per_node}",
        )
    if job.limit_s and job.grace_s >= job.limit_s:
        got = f"a limit of {job.limit_s} s, {job.grace_s} s to save"
        raise UserError("the job would end before it has begun", where=settings["time"].where, got=got)
    if job.api != "trainjob":
        if "runtime" in settings:
            raise UserError("only a trainjob has a runtime", where=settings["runtime"].where, hint="--api trainjob")
        return
    for name in ("secret", "priority_class", "retries"):
        if name in settings:
            raise UserError(
                f"a TrainJob leaves {kubernetes_settings()[name].flag} to its runtime",
                where=settings[name].where,
                got=" ".join(settings[name].values),
                hint="--api jobset, or write it into the runtime",
            )
