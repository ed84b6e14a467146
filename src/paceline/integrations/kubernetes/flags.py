"""The flags of `paceline submit kubernetes`. Each value and each combination is checked before anything starts."""

from __future__ import annotations

from functools import cache

from paceline.errors import UserError
from paceline.integrations.kubernetes.job import DATA_PATH, RUNS_PATH, KubernetesJob, longest_name
from paceline.integrations.kubernetes.values import (
    flag_of,
    in_bytes,
    parse_api,
    parse_capabilities,
    parse_gpu_resource,
    parse_image,
    parse_job_name,
    parse_pairs,
    parse_resources,
    parse_size,
    parse_tolerations,
    parse_user,
    parse_variables,
    read_name,
    read_names,
    read_number,
    read_text,
)
from paceline.integrations.kubernetes.volumes import parse_runs, parse_volumes
from paceline.launch.job import parse_time_s
from paceline.settings.sites import JobSetting, JobSettings, check_given


@cache
def kubernetes_settings() -> dict[str, JobSetting]:
    """The flags by name, in the order of `--help`."""
    settings = [
        JobSetting("image", "IMAGE", "container image with paceline in it, with a tag or a digest"),
        JobSetting("nodes", "N", "pods, one to a node (1)", "number"),
        JobSetting("gpus_per_node", "N", "GPUs, and ranks, of each pod", "number"),
        JobSetting("gpus", "N", "GPUs in all, instead of per node", "number"),
        JobSetting("processes_per_node", "N", "ranks of each pod, on CPUs", "number"),
        JobSetting(
            "runs", "CLAIM", f"where runs are kept: a PersistentVolumeClaim or /PATH of all nodes; at {RUNS_PATH}"
        ),
        JobSetting(
            "data", "CLAIM", f"where data is kept: a PersistentVolumeClaim or /PATH of all nodes; at {DATA_PATH}"
        ),
        JobSetting("mount", "CLAIM:PATH", "one more volume, CLAIM or /PATH, optionally :ro; may be repeated", "lines"),
        JobSetting("api", "KIND", "job (needs no operator), jobset, or trainjob (Kubeflow Trainer v2)"),
        JobSetting("runtime", "NAME", "training runtime of a trainjob (torch-distributed)"),
        JobSetting("cpus", "N", "CPUs of each pod (one per CPU rank; more for GPUs with --num-workers)", "number"),
        JobSetting("memory", "SIZE", "memory of each pod, as 64Gi (4Gi per CPU rank, 16Gi per GPU)"),
        JobSetting("shm", "SIZE", "/dev/shm of each pod, out of its memory (1Gi; 8Gi with GPUs)"),
        JobSetting("ephemeral_storage", "SIZE", "local disk of each pod, /tmp included, as 20Gi (no limit)"),
        JobSetting("gpu_resource", "NAME", "what the cluster calls a GPU (nvidia.com/gpu)"),
        JobSetting("resource", "NAME=N", "one more resource of each pod, as rdma/hca=1; may be repeated", "lines"),
        JobSetting("capability", "NAME", "capability of Linux for the pods, as IPC_LOCK; may be repeated", "list"),
        JobSetting("time", "LIMIT", "the job is ended after: MINUTES, HH:MM:SS or D-HH:MM:SS"),
        JobSetting("grace", "S", "seconds to save after SIGTERM (measured by an earlier save, else 120)", "number"),
        JobSetting("start_timeout", "S", "seconds that pods wait for all pods to start (900)", "number"),
        JobSetting(
            "retries", "N", "allowed failures of each pod, per day of --time; lost nodes do not count (3)", "number"
        ),
        JobSetting("node_timeout", "S", "seconds until pods of a lost node are evicted (300)", "number"),
        JobSetting("namespace", "NAME", "namespace (the kubeconfig's)"),
        JobSetting("context", "NAME", "context of the kubeconfig (its current one)"),
        JobSetting("queue", "NAME", "Kueue's local queue: the job waits there, suspended"),
        JobSetting("scheduler", "NAME", "scheduler of the pods, as volcano (the cluster's)"),
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
        JobSetting("label", "KEY=VALUE", "label of the pods; may be repeated", "lines"),
        JobSetting("annotation", "KEY=VALUE", "annotation of the pods; may be repeated", "lines"),
        JobSetting("user", "UID[:GID]", "who the pods are; never root (10001)"),
        JobSetting("port", "N", "where pods meet (29400)", "number"),
        JobSetting("job_name", "NAME", "name in the cluster (the run folder's)"),
        JobSetting("dry_run", "", "print the manifest, submit nothing", "switch"),
    ]
    return {setting.name: setting for setting in settings}


def parse_kubernetes_job(settings: JobSettings) -> KubernetesJob:
    """Build the job from the flags. Checks every value and every combination."""
    check_given(settings)
    nodes = read_number(settings, "nodes", 1, low=1, high=10_000)
    ranks, has_gpus = _parse_ranks(settings, nodes)
    api, runtime = parse_api(settings), read_name(settings, "runtime", dots=True) or KubernetesJob.runtime
    user, group = parse_user(settings)
    job = KubernetesJob(
        image=parse_image(settings),
        runs=parse_runs(settings),
        name=parse_job_name(settings, longest_name(api, nodes, runtime)),
        nodes=nodes,
        ranks_per_node=ranks,
        has_gpus=has_gpus,
        gpu_resource=parse_gpu_resource(settings),
        volumes=parse_volumes(settings),
        api=api,
        runtime=runtime,
        cpus=read_number(settings, "cpus", 0, low=1, high=10_000),
        memory=parse_size(settings, "memory") or f"{ranks * (16 if has_gpus else 4)}Gi",
        shm=parse_size(settings, "shm") or ("8Gi" if has_gpus else "1Gi"),
        limit_s=parse_time_s(read_text(settings, "time"), settings["time"].where) if "time" in settings else 0,
        grace_s=read_number(settings, "grace", 0, low=1, high=86_400),
        start_timeout_s=read_number(settings, "start_timeout", KubernetesJob.start_timeout_s, low=10, high=604_800),
        retries=read_number(settings, "retries", KubernetesJob.retries, high=1000),
        namespace=read_name(settings, "namespace"),
        context=read_text(settings, "context"),
        queue=read_name(settings, "queue", dots=True, longest=63),
        priority_class=read_name(settings, "priority_class", dots=True),
        service_account=read_name(settings, "service_account", dots=True),
        image_pull_secrets=read_names(settings, "image_pull_secret"),
        secrets=read_names(settings, "secret"),
        env=parse_variables(settings),
        node_selector=parse_pairs(settings, "node_selector"),
        tolerations=parse_tolerations(settings),
        node_timeout_s=read_number(settings, "node_timeout", 0, low=1, high=86_400),
        labels=parse_pairs(settings, "label"),
        annotations=parse_pairs(settings, "annotation"),
        resources=parse_resources(settings),
        capabilities=parse_capabilities(settings),
        scheduler=read_name(settings, "scheduler", dots=True),
        ephemeral_storage=parse_size(settings, "ephemeral_storage"),
        user=user,
        group=group,
        port=read_number(settings, "port", KubernetesJob.port, low=1024, high=65_535),
    )
    _check_together(job, settings)
    return job


# --- Combinations -----------------------------------------------------------------------------------------------------


def _parse_ranks(settings: JobSettings, nodes: int) -> tuple[int, bool]:
    """Ranks of each pod, and whether they have GPUs."""
    given = [name for name in ("gpus_per_node", "gpus", "processes_per_node") if name in settings]
    if len(given) != 1:
        flags = [f"{flag_of(name)} {settings[name].values[-1]}" for name in given]
        raise UserError(
            "ranks are given twice" if given else "how many ranks has a pod?",
            got=" and ".join(flags) or None,
            allowed="one of --gpus-per-node N, --gpus N in all, or --processes-per-node N on CPUs",
            hint="kubectl describe nodes lists CPUs and GPUs" if not given else None,
        )
    if given == ["gpus"]:
        gpus = read_number(settings, "gpus", 0, low=1)
        if gpus % nodes:
            near = sorted({max(nodes, gpus - gpus % nodes), gpus - gpus % nodes + nodes})
            raise UserError(
                f"{gpus} GPUs cannot be shared equally by {nodes} nodes",
                where=settings["gpus"].where,
                allowed=f"a multiple of {nodes}",
                hint=f"--gpus {' or '.join(map(str, near))}",
            )
        return gpus // nodes, True
    return read_number(settings, given[0], 0, low=1, high=1024), given == ["gpus_per_node"]


def _check_together(job: KubernetesJob, settings: JobSettings) -> None:
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
        raise UserError("the job would end before it has begun", where=settings["time"].where, got=got)
    if job.api != "trainjob":
        if "runtime" in settings:
            raise UserError("only a trainjob has a runtime", where=settings["runtime"].where, hint="--api trainjob")
        return
    for name in ("secret", "priority_class", "retries", "scheduler"):
        if name in settings:
            raise UserError(
                f"a TrainJob leaves {flag_of(name)} to its runtime",
                where=settings[name].where,
                got=" ".join(settings[name].values),
                hint="--api jobset, or write it into the runtime",
            )
