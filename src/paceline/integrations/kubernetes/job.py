"""A Kubernetes job as data. `flags.py` creates it from flags, `manifest.py` writes the manifest."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal, get_args

Api = Literal["job", "jobset", "trainjob"]
APIS: tuple[Api, ...] = get_args(Api)
RUNS_PATH, DATA_PATH = "/runs", "/data"
FILES_PATH = "/etc/paceline"  # the user's recipe and functions
REPLICATED_JOB = "node"  # in a JobSet: the same name as in Kubeflow's runtimes, so that host names are the same
DEFAULT_RUNTIME = "torch-distributed"
_LONGEST_LABEL = 63  # DNS limit for names of pods, jobs and services
_LONGEST_NAME = 50


@dataclass(frozen=True)
class Volume:
    """A claim or a folder of every node, and its mount path."""

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
    """All values of the manifest."""

    image: str
    runs: Volume
    name: str = "paceline"
    command: tuple[str, ...] = ()  # the typed command, as a comment in the manifest
    train: tuple[str, ...] = ()  # the arguments of `paceline train`
    files: tuple[tuple[str, str], ...] = ()  # name and text of each file the pods need
    nodes: int = 1
    ranks_per_node: int = 1
    has_gpus: bool = False
    gpu_resource: str = "nvidia.com/gpu"
    volumes: tuple[Volume, ...] = ()  # in addition to the volume of runs
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
    labels: tuple[tuple[str, str], ...] = ()  # of the pods, in addition to our own
    annotations: tuple[tuple[str, str], ...] = ()  # of the pods
    resources: tuple[tuple[str, str], ...] = ()  # in addition to CPUs, memory and GPUs
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
        """Allowed failures per pod; for a JobSet, of all pods together. Grows with the time limit."""
        return self.retries * max(1, math.ceil(self.limit_s / 86_400))

    @property
    def all_volumes(self) -> tuple[Volume, ...]:
        return (self.runs, *self.volumes)

    def holds(self, path: str) -> bool:
        """Whether this path is on a volume of the pods."""
        place = PurePosixPath(path)
        return any(place.is_relative_to(volume.path) for volume in self.all_volumes)


def longest_name(api: Api, nodes: int, runtime: str = DEFAULT_RUNTIME) -> int:
    """The longest job name for which the names of pods and inner jobs are valid."""
    suffixes = [f"-{nodes - 1}"]  # the host name of a pod
    if api != "job":
        suffixes.append(
            f"-{REPLICATED_JOB}-0-{nodes - 1}-abcde"
        )  # a pod, with the five random letters of its controller
    if api == "trainjob" and runtime != DEFAULT_RUNTIME:
        suffixes.append("-dataset-initializer-0")  # other runtimes may have this job
    return min(_LONGEST_NAME, _LONGEST_LABEL - max(map(len, suffixes)))


def as_name(text: str, longest: int = _LONGEST_NAME) -> str:
    """The nearest name that Kubernetes accepts. A long text is cut at its beginning: the end contains the time."""
    name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
    short = name[-longest:].strip("-")
    if not short[:1].isdigit():
        return short
    return f"run-{name[4 - longest :].strip('-')}"  # the name of a Service must start with a letter
