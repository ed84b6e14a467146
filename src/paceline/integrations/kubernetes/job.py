"""A Kubernetes job: its flags, declared once for the command line and for help, and its rules.

`manifest.py` writes it as YAML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from paceline.errors import UserError
from paceline.integrations.kubernetes.values import (
    LONGEST_NAME,
    NODE_TAINTS,
    PodUser,
    Toleration,
    Volume,
    check_pairs,
    check_volumes,
    in_bytes,
    name_parser,
    parse_capability,
    parse_data,
    parse_gpu_resource,
    parse_image,
    parse_mount,
    parse_pair,
    parse_resource,
    parse_runs,
    parse_size,
    parse_toleration,
    parse_user,
    parse_variable,
    parse_word,
    refuse_repeated,
    require_job_name,
)
from paceline.launch.job import parse_time_s
from paceline.settings.declare import Arg, Range
from paceline.settings.values import Setting, build, invalid

Api = Literal["job", "jobset", "trainjob"]
REPLICATED_JOB = "node"  # in a JobSet: the same name as in Kubeflow's runtimes, so that host names are the same
DEFAULT_RUNTIME = "torch-distributed"
_LONGEST_LABEL = 63  # DNS limit for names of pods, jobs and services
_LONGEST_S = 86_400
_DEFAULT_USER = PodUser()


def _parse_limit_s(text: str, setting: Setting) -> int:
    return parse_time_s(text, setting.where)


def _parse_api(text: str, setting: Setting) -> str:
    """In capital letters, too."""
    if text.lower() not in setting.field.choices:
        raise invalid(setting, text.lower())
    return text.lower()


Size = Annotated[str, Arg("SIZE", parse=parse_size)]
Name = Annotated[str, Arg("NAME", parse=name_parser(dots=True))]
Pairs = tuple[tuple[str, str], ...]
Computed = Arg(place="none")


def _many(name: str, shown: str, parse: Any, *, commas: bool = False) -> Arg:
    """A flag that may be repeated."""
    return Arg(shown, name=name, many="commas" if commas else "lines", parse=parse)


@dataclass(frozen=True)
class KubernetesJob:
    """Everything that the manifest contains: the flags, and what is computed from the recipe."""

    image: Annotated[str, Arg("IMAGE", parse=parse_image)]
    """Container image with paceline in it, with a tag or a digest: docker build --tag REGISTRY/paceline:0.1.0 ."""
    runs: Annotated[Volume, Arg("CLAIM", parse=parse_runs)]
    """Where runs are kept: a PersistentVolumeClaim that all pods can write, or /PATH of all nodes; in the pods at
    /runs. `kubectl get pvc` lists claims, examples/kubernetes/storage.yaml creates one."""
    nodes: Annotated[int, Range(low=1, high=10_000)] = 1
    """Pods, each on its own node."""
    gpus_per_node: Annotated[int, Range(low=1, high=1024)] = 0
    """GPUs, and ranks, of each pod."""
    gpus: Annotated[int, Range(low=1, high=1_000_000)] = 0
    """GPUs in all, instead of per node."""
    processes_per_node: Annotated[int, Range(low=1, high=1024)] = 0
    """Ranks of each pod, on CPUs."""
    data: Annotated[Volume | None, Arg("CLAIM", parse=parse_data)] = None
    """Where the data is: a PersistentVolumeClaim or /PATH of all nodes; in the pods at /data."""
    mounts: Annotated[tuple[Volume, ...], _many("mount", "CLAIM:PATH", parse_mount)] = ()
    """One more volume, CLAIM or /PATH, optionally :ro; may be repeated."""
    api: Annotated[Api, Arg(parse=_parse_api)] = "job"
    """job (needs no operator), jobset, or trainjob (Kubeflow Trainer v2)."""
    runtime: Name = DEFAULT_RUNTIME
    """Training runtime of a trainjob."""
    cpus: Annotated[int, Range(low=1, high=10_000)] = 0
    """CPUs of each pod (one per CPU rank unless given; for GPUs more, with --num-workers)."""
    memory: Size = ""
    """Memory of each pod, for example 64Gi (4Gi per CPU rank, 16Gi per GPU unless given)."""
    shm: Size = ""
    """/dev/shm of each pod, out of its memory (1Gi, with GPUs 8Gi, unless given)."""
    ephemeral_storage: Size = ""
    """Local disk of each pod, including /tmp, for example 20Gi (no limit unless given)."""
    gpu_resource: Annotated[str, Arg("NAME", parse=parse_gpu_resource)] = "nvidia.com/gpu"
    """The cluster's name for a GPU."""
    resources: Annotated[Pairs, _many("resource", "NAME=N", parse_resource)] = ()
    """One more resource of each pod, for example rdma/hca=1; may be repeated."""
    capabilities: Annotated[tuple[str, ...], _many("capability", "NAME", parse_capability, commas=True)] = ()
    """Capability of Linux for the pods, for example IPC_LOCK; may be repeated."""
    limit_s: Annotated[int, Arg("LIMIT", name="time", parse=_parse_limit_s)] = 0
    """The job ends after: MINUTES, HH:MM:SS or D-HH:MM:SS."""
    grace_s: Annotated[int, Range(low=1, high=_LONGEST_S), Arg("S")] = 0
    """Seconds to save after SIGTERM (from the duration of an earlier save unless given, else 120)."""
    start_timeout_s: Annotated[int, Range(low=10, high=7 * _LONGEST_S), Arg("S")] = 900
    """Seconds that pods wait until all of them have started."""
    retries: Annotated[int, Range(low=0, high=1000)] = 3
    """Failures of each pod, per day of --time; lost nodes do not count."""
    node_timeout_s: Annotated[int, Range(low=1, high=_LONGEST_S), Arg("S")] = 0
    """Seconds until the pods of a lost node are evicted (the cluster's default, 300, unless given)."""
    namespace: Annotated[str, Arg("NAME", parse=name_parser())] = ""
    """Namespace (the kubeconfig's unless given)."""
    context: Annotated[str, Arg("NAME", parse=parse_word)] = ""
    """Context of the kubeconfig (the current one unless given)."""
    queue: Annotated[str, Arg("NAME", parse=name_parser(dots=True, longest=63))] = ""
    """Kueue's local queue, in which the job waits suspended."""
    scheduler: Name = ""
    """Scheduler of the pods, for example volcano (the cluster's unless given)."""
    priority_class: Name = ""
    """Priority class of the pods."""
    service_account: Name = ""
    """Service account of the pods; they get no token."""
    image_pull_secrets: Annotated[
        tuple[str, ...], _many("image_pull_secret", "NAME", name_parser(dots=True), commas=True)
    ] = ()
    """Secret for the registry of the image; may be repeated."""
    secrets: Annotated[tuple[str, ...], _many("secret", "NAME", name_parser(dots=True), commas=True)] = ()
    """Secret whose keys become variables; may be repeated."""
    env: Annotated[Pairs, Arg("NAME=VALUE", many="lines", parse=parse_variable, is_secret=True)] = ()
    """Variable of the pods; NAME=secret:SECRET/KEY refers to a Secret; may be repeated."""
    node_selector: Annotated[Pairs, _many("", "KEY=VALUE", parse_pair)] = ()
    """Label that a node must have; may be repeated."""
    tolerations: Annotated[tuple[Toleration, ...], _many("toleration", "KEY[=VALUE][:EFFECT]", parse_toleration)] = ()
    """Taint that the pods tolerate; may be repeated."""
    labels: Annotated[Pairs, _many("label", "KEY=VALUE", parse_pair)] = ()
    """Label of the pods; may be repeated."""
    annotations: Annotated[Pairs, _many("annotation", "KEY=VALUE", parse_pair)] = ()
    """Annotation of the pods; may be repeated."""
    user: Annotated[PodUser, Arg("UID[:GID]", parse=parse_user)] = _DEFAULT_USER
    """User of the pods; never root."""
    port: Annotated[int, Range(low=1024, high=65_535)] = 29400
    """Port by which the pods connect."""
    name: Annotated[str, Arg("NAME", name="job_name", parse=parse_word)] = "paceline"
    """Name in the cluster (the run folder's unless given)."""
    command: Annotated[tuple[str, ...], Computed] = ()  # the command of the user, for readers of the manifest
    train: Annotated[tuple[str, ...], Computed] = ()  # the arguments of `paceline train`
    files: Annotated[Pairs, Computed] = ()  # name and text of each file that the pods need

    @property
    def has_gpus(self) -> bool:
        return bool(self.gpus or self.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.gpus // self.nodes or self.processes_per_node or 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def most_failures(self) -> int:
        """Allowed failures per pod; for a JobSet, of all pods together. Grows with the time limit."""
        return self.retries * max(1, math.ceil(self.limit_s / 86_400))

    @property
    def all_volumes(self) -> tuple[Volume, ...]:
        return (self.runs, *([self.data] if self.data is not None else []), *self.mounts)

    def holds(self, path: str) -> bool:
        """Whether this path is on a volume of the pods."""
        place = PurePosixPath(path)
        return any(place.is_relative_to(volume.path) for volume in self.all_volumes)


def longest_name(api: Api, nodes: int, runtime: str = DEFAULT_RUNTIME) -> int:
    """The longest job name for which the names of pods and inner jobs are valid."""
    suffixes = [f"-{nodes - 1}"]  # the host name of a pod
    if api != "job":
        # A pod, with the five random letters of its controller.
        suffixes.append(f"-{REPLICATED_JOB}-0-{nodes - 1}-abcde")
    if api == "trainjob" and runtime != DEFAULT_RUNTIME:
        suffixes.append("-dataset-initializer-0")  # other runtimes may have this job
    return min(LONGEST_NAME, _LONGEST_LABEL - max(map(len, suffixes)))


# --- The rules --------------------------------------------------------------------------------------------------------


def parse_kubernetes_job(settings: Mapping[str, Setting]) -> KubernetesJob:
    """The flags of a job, checked one by one and together."""
    _require_ranks(settings)
    job = build(KubernetesJob, settings.values())
    _check_ranks(job, settings)
    if "job_name" in settings:
        require_job_name(job.name, longest_name(job.api, job.nodes, job.runtime), settings["job_name"])
    job = replace(
        job,
        memory=job.memory or f"{job.ranks_per_node * (16 if job.has_gpus else 4)}Gi",
        shm=job.shm or ("8Gi" if job.has_gpus else "1Gi"),
    )
    check_volumes(job.all_volumes[1:], settings.get("mount"))
    _check_lists(job, settings)
    _check_together(job, settings)
    _check_trainjob(job, settings)
    return job


def _require_ranks(settings: Mapping[str, Setting]) -> None:
    given = [name for name in ("gpus_per_node", "gpus", "processes_per_node") if name in settings]
    if len(given) != 1:
        flags = [f"{settings[name].field.flag} {settings[name].values[-1]}" for name in given]
        raise UserError(
            "ranks are given twice" if given else "the number of ranks per pod is missing",
            got=" and ".join(flags) or None,
            allowed="one of --gpus-per-node N, --gpus N in all, or --processes-per-node N on CPUs",
            hint="kubectl describe nodes lists CPUs and GPUs" if not given else None,
        )


def _check_ranks(job: KubernetesJob, settings: Mapping[str, Setting]) -> None:
    if job.gpus % job.nodes:
        below = job.gpus - job.gpus % job.nodes
        near = sorted({max(job.nodes, below), below + job.nodes})
        raise UserError(
            f"{job.gpus} GPUs cannot be shared equally by {job.nodes} nodes",
            where=settings["gpus"].where,
            allowed=f"a multiple of {job.nodes}",
            hint=f"--gpus {' or '.join(map(str, near))}",
        )


def _check_lists(job: KubernetesJob, settings: Mapping[str, Setting]) -> None:
    for name in ("image_pull_secret", "secret", "capability", "toleration"):
        refuse_repeated(settings[name].values if name in settings else (), settings.get(name))
    pairs = {"resource": job.resources, "env": job.env, "label": job.labels, "annotation": job.annotations}
    for name, rows in {**pairs, "node_selector": job.node_selector}.items():
        check_pairs(rows, settings.get(name))
    if job.gpu_resource in dict(job.resources):
        text = f"{job.gpu_resource}={dict(job.resources)[job.gpu_resource]}"
        raise invalid(settings["resource"], text, "a resource beside the GPUs", "--gpus-per-node N")
    for toleration in job.tolerations:
        if toleration.key in NODE_TAINTS and job.node_timeout_s:
            what = "the time until a lost node is given up is given twice"
            got = f"--toleration {toleration.key} and --node-timeout-s"
            raise UserError(what, where=settings["toleration"].where, got=got, hint="leave one out")


def _check_together(job: KubernetesJob, settings: Mapping[str, Setting]) -> None:
    if in_bytes(job.shm) >= in_bytes(job.memory):
        where = settings["shm" if "shm" in settings else "memory"].where
        got = f"{job.shm} of {job.memory}"
        raise UserError("/dev/shm would use all memory of the pod", where=where, got=got, hint="a larger --memory")
    if job.cpus and job.cpus < job.ranks_per_node:
        raise UserError(
            "more ranks than CPUs in a pod",
            where=settings["cpus"].where,
            got=f"{job.ranks_per_node} ranks on {job.cpus} CPUs",
            hint=f"--cpus {job.ranks_per_node}",
        )
    if job.limit_s and job.grace_s >= job.limit_s:
        got = f"a limit of {job.limit_s} s, {job.grace_s} s to save"
        raise UserError("the job would end before it starts", where=settings["time"].where, got=got)


def _check_trainjob(job: KubernetesJob, settings: Mapping[str, Setting]) -> None:
    if job.api != "trainjob":
        if "runtime" in settings:
            raise UserError("only a trainjob has a runtime", where=settings["runtime"].where, hint="--api trainjob")
        return
    for name in ("secret", "priority_class", "retries", "scheduler"):
        if name in settings:
            raise UserError(
                f"the runtime of a TrainJob decides {settings[name].field.flag}",
                where=settings[name].where,
                got=" ".join(settings[name].values),
                hint="--api jobset, or write it into the runtime",
            )
