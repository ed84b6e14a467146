"""A job for a Kubernetes cluster, as data; `kubernetes_manifest.py` writes it down, `kubernetes_flags.py` reads it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal, get_args

Api = Literal["job", "jobset", "trainjob"]
APIS: tuple[Api, ...] = get_args(Api)
RUNS_PATH, DATA_PATH = "/runs", "/data"
FILES_PATH = "/etc/paceline"  # a recipe and functions of the user's own
REPLICATED_JOB = "node"  # of a JobSet: as Kubeflow's runtimes call theirs, so that host names are the same
DEFAULT_RUNTIME = "torch-distributed"
_LONGEST_LABEL = 63  # of DNS: names of pods, jobs and services
_LONGEST_NAME = 50


@dataclass(frozen=True)
class Volume:
    """A claim or a folder of every node, and where pods see it."""

    source: str
    path: str
    is_read_only: bool = False

    @property
    def is_host_path(self) -> bool:
        return self.source.startswith("/")


@dataclass(frozen=True)
class Toleration:
    key: str
    value: str = ""
    effect: str = ""


@dataclass(frozen=True)
class KubernetesJob:
    """Everything the manifest says."""

    image: str
    runs: Volume
    name: str = "paceline"
    command: tuple[str, ...] = ()  # what was typed, for the reader of the manifest
    train: tuple[str, ...] = ()  # the arguments of `paceline train`
    files: tuple[tuple[str, str], ...] = ()  # name and text of each file the pods need
    nodes: int = 1
    ranks_per_node: int = 1
    has_gpus: bool = False
    gpu_resource: str = "nvidia.com/gpu"
    volumes: tuple[Volume, ...] = ()  # beside the one of runs
    api: Api = "job"
    runtime: str = DEFAULT_RUNTIME
    cpus: int = 0
    memory: str = ""
    shm: str = ""
    limit_s: int = 0
    grace_s: int = 0
    start_timeout_s: int = 900
    retries: int = 3
    namespace: str = ""
    context: str = ""
    queue: str = ""
    priority_class: str = ""
    service_account: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    node_timeout_s: int = 0  # 0: the cluster's default, 300
    labels: tuple[tuple[str, str], ...] = ()  # of the pods, beside our own
    annotations: tuple[tuple[str, str], ...] = ()  # of the pods
    resources: tuple[tuple[str, str], ...] = ()  # beside CPUs, memory and GPUs
    capabilities: tuple[str, ...] = ()
    scheduler: str = ""
    ephemeral_storage: str = ""
    user: int = 10001
    group: int = 10001
    port: int = 29400

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def most_failures(self) -> int:
        """Failures of its own that a pod may have; of a JobSet, all pods together. More for a longer run."""
        return self.retries * max(1, math.ceil(self.limit_s / 86_400))

    @property
    def all_volumes(self) -> tuple[Volume, ...]:
        return (self.runs, *self.volumes)

    def holds(self, path: str) -> bool:
        """Whether pods find this path on a volume."""
        place = PurePosixPath(path)
        return any(place.is_relative_to(volume.path) for volume in self.all_volumes)


def longest_name(api: Api, nodes: int, runtime: str = DEFAULT_RUNTIME) -> int:
    """Of a job whose pods and inner jobs still have names. An operator refuses a longer one, or waits for ever."""
    suffixes = [f"-{nodes - 1}"]  # the host name of a pod
    if api != "job":
        suffixes.append(f"-{REPLICATED_JOB}-0-{nodes - 1}-abcde")  # a pod, with the five letters of its controller
    if api == "trainjob" and runtime != DEFAULT_RUNTIME:
        suffixes.append("-dataset-initializer-0")  # other runtimes may have such a job
    return min(_LONGEST_NAME, _LONGEST_LABEL - max(map(len, suffixes)))


def as_name(text: str, longest: int = _LONGEST_NAME) -> str:
    """The nearest name that Kubernetes takes; of a long one the end, which has the time in it."""
    name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
    short = name[-longest:].strip("-")
    if not short[:1].isdigit():
        return short
    return f"run-{name[4 - longest :].strip('-')}"  # a Service's name begins with a letter
