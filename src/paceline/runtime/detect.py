"""Reads rank and world size from the launcher's environment and builds one frozen `World`.

`read_rank_environment` needs no torch, so a wrong launch is refused before torch is imported.
`build_world` adds the device.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.runs.machine import THIS_MACHINE, stat_fields
from paceline.runtime.resources import count_gpus_without_torch, usable_cores
from paceline.runtime.slurm import read_slurm_task
from paceline.runtime.this_rank import OWN_LAUNCHER
from paceline.settings.schema import ParallelConfig
from paceline.settings.values import read_whole

_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ATTEMPT = "PACELINE_ATTEMPT"  # also set by it: the number of this attempt, from 1
STORE_FD = "PACELINE_STORE_FD"  # also set by it, for rank 0: the listening socket of the ranks' store
MACHINE = "PACELINE_MACHINE"  # set in the pods of our Kubernetes jobs: the node they run on
START = "PACELINE_START"  # "agent": this process starts the ranks of its node; each node has one agent
AGENT = "PACELINE_AGENT"  # the agent's node, if srun does not set it: NODE/NODES@HOST:PORT
_RUN_ID = "TORCHELASTIC_RUN_ID"
_NO_RUN_ID = "none"  # torchrun's default, the same for every job


def name_machine(environment: Mapping[str, str] = os.environ) -> str:
    """The name of this machine that its scheduler knows. In a pod the host name is the pod's."""
    return environment.get("SLURMD_NODENAME") or environment.get(MACHINE) or socket.gethostname()


@dataclass(frozen=True)
class RankEnvironment:
    """The launcher's environment variables, parsed."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    store_host: str = ""
    store_port: int = 0
    has_store_server: bool = False  # the launcher keeps the store; otherwise rank 0 does
    store_fd: int | None = None  # for rank 0: a socket that already listens for the store
    says_local_ranks: bool = True  # whether the launcher gives the number of ranks on this node
    attempt: int = 1

    @property
    def is_on_one_node(self) -> bool:
        """True if this is certain. The run then listens on loopback only."""
        return self.says_local_ranks and self.local_world_size == self.world_size

    @property
    def is_supervised(self) -> bool:
        return self.launcher == "paceline"


@dataclass(frozen=True)
class World:
    """The topology of this run, and this process's rank in it. Built once, never changed."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    host: str
    device: str  # "cpu" or "cuda:1"
    backend: str  # "gloo" or "nccl"
    threads: int
    ranks_per_gpu: int = 1  # more: a rehearsal

    @property
    def is_primary(self) -> bool:
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank" + ("s" if self.world_size > 1 else "")
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        kind = "cuda" if self.device.startswith("cuda") else "cpu"
        threads = f"{self.threads} CPU thread" + ("s" if self.threads > 1 else "")
        threads += " each" if self.world_size > 1 else ""
        shared = f" (a rehearsal: {self.ranks_per_gpu} ranks on each GPU)" if self.ranks_per_gpu > 1 else ""
        return f"{ranks}{nodes} by {self.launcher}, {kind}, {self.backend}{shared}, {threads}"


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job. Each has an agent that starts its ranks. A single node is this machine."""

    count: int = 1
    own: int = 0  # this node's number
    host: str = "localhost"  # the rendezvous of the agents
    port: int = 0  # 0: any free port
    run_id: str = "paceline"


def agent_variables(nodes: Nodes) -> dict[str, str]:
    """The variables that make `paceline train` the agent of one of several nodes; see `read_nodes`."""
    return {START: "agent", AGENT: f"{nodes.own}/{nodes.count}@{nodes.host}:{nodes.port}"}


def read_nodes(environment: Mapping[str, str] = os.environ) -> Nodes:
    """The node of this agent, and the number of nodes."""
    if environment.get(START) != "agent":
        return Nodes()
    if AGENT in environment:
        return _parse_agent(environment[AGENT])
    task = read_slurm_task(environment)
    if task is None:
        return Nodes()
    if task.local_tasks != 1:
        raise UserError(
            "one agent per node starts all ranks of its node",
            got=f"{task.local_tasks} tasks on a node",
            hint="srun --ntasks-per-node=1, or unset PACELINE_START and start one task per rank",
        )
    return Nodes(task.nodes, task.node, task.hosts[0], task.port, f"paceline-{task.job_id}")


def _parse_agent(text: str) -> Nodes:
    place, _, meeting = text.partition("@")
    own, _, count = place.partition("/")
    host, _, port = meeting.rpartition(":")
    if not (own.isdecimal() and count.isdecimal() and port.isdecimal() and host and int(own) < int(count)):
        raise UserError(f"{AGENT} is malformed", got=text, allowed="NODE/NODES@HOST:PORT, for example 0/2@node-0:20000")
    return Nodes(int(count), int(own), host, int(port))


def read_rank_environment(environment: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """The launcher's variables, parsed. None if no launcher started this process as a rank."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return _read_slurm_rank(environment)
    missing = [name for name in _LAUNCH_VARIABLES if name not in environment]
    if missing:
        raise UserError(
            f"the launcher's environment is incomplete: {', '.join(missing)} not set",
            got=", ".join(f"{n}={environment[n]}" for n in _LAUNCH_VARIABLES if n in environment),
            hint="start with torchrun or with paceline train --processes N, or unset RANK and WORLD_SIZE",
        )
    numbers = {}
    for name in ("MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        text = environment.get(name, environment["WORLD_SIZE"])
        if not text.isdecimal():
            raise UserError(f"{name} in the environment is not a number", got=text)
        numbers[name] = int(text)
    if not (0 <= numbers["RANK"] < numbers["WORLD_SIZE"] and numbers["LOCAL_RANK"] < numbers["LOCAL_WORLD_SIZE"]):
        raise UserError(
            "the launcher's environment contradicts itself",
            got=", ".join(f"{name}={value}" for name, value in numbers.items()),
            allowed="RANK below WORLD_SIZE and LOCAL_RANK below LOCAL_WORLD_SIZE",
        )
    own = environment.get(OWN_LAUNCHER)
    launcher = own or ("torchrun" if "TORCHELASTIC_RUN_ID" in environment else "the environment")
    return RankEnvironment(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        launcher=launcher,
        store_host=environment["MASTER_ADDR"],
        store_port=numbers["MASTER_PORT"],
        has_store_server=environment.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        store_fd=read_whole(STORE_FD, 0, environment) if STORE_FD in environment else None,
        says_local_ranks="LOCAL_WORLD_SIZE" in environment,
        attempt=read_whole(ATTEMPT, 0, environment) or 1 + read_whole("TORCHELASTIC_RESTART_COUNT", 0, environment),
    )


def rank_variables(place: RankEnvironment) -> dict[str, str]:
    """The variables that our own launcher sets for a rank; see `read_rank_environment`."""
    return {
        OWN_LAUNCHER: place.launcher,
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": place.store_host,
        "MASTER_PORT": str(place.store_port),
    }


def check_whole_job(ranks: RankEnvironment | None, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a job of several nodes that would train on its first node only."""
    text = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    nodes = int(text) if text.isdecimal() else 1
    if nodes == 1 or read_slurm_task(environment) is not None:
        return
    if ranks is not None and ranks.world_size > ranks.local_world_size:
        return  # the user's own launcher has started ranks on the other nodes
    what = "torchrun" if ranks is not None and ranks.launcher == "torchrun" else "paceline train"
    line = (
        "export PACELINE_RUN_SECRET=$(openssl rand -hex 32)\n"
        "PACELINE_START=agent srun --ntasks-per-node=1 --kill-on-bad-exit=1 python -m paceline train ..."
    )
    if what == "torchrun":
        line = f"srun --ntasks-per-node=1 bash -c 'torchrun --nnodes={nodes} --node-rank=$SLURM_NODEID ...'"
    raise UserError(
        f"the job has {nodes} nodes, but only one of them would train",
        got=f"{what} without srun",
        hint=f"{line}\nor: paceline submit slurm; or sbatch --nodes=1",
    )


def _read_slurm_rank(environment: Mapping[str, str]) -> RankEnvironment | None:
    """One task per rank, started by srun. A single task is an interactive shell or an agent: None."""
    task = read_slurm_task(environment)
    if task is None or task.tasks == 1 or environment.get(START) == "agent":
        return None
    return RankEnvironment(
        rank=task.task,
        world_size=task.tasks,
        local_rank=task.local_task,
        local_world_size=task.local_tasks,
        launcher="srun",
        store_host=task.hosts[0] if task.nodes > 1 else "127.0.0.1",
        store_port=task.port,
        attempt=1 + int(environment.get("SLURM_RESTART_COUNT", "0")),
    )


ALONE = RankEnvironment(rank=0, world_size=1, local_rank=0, local_world_size=1, launcher="this process")


def threads_per_rank(config: ParallelConfig, ranks_sharing: int) -> int:
    """`ranks_sharing`: how many ranks share the cores of this process; 1 if each rank is a separate Slurm task."""
    if config.exact:  # the number of threads changes the order of sums, so it must not depend on the ranks
        return config.omp_num_threads or 1
    return config.omp_num_threads or max(1, usable_cores() // ranks_sharing)


def count_gpus(config: ParallelConfig) -> int:
    """GPUs that this process sees; 0 if the user chose the CPU."""
    if config.device == "cpu":
        return 0
    count = count_gpus_without_torch()
    if count is None:
        import torch

        count = torch.cuda.device_count()
    if config.device == "cuda" and count == 0:
        raise UserError("no CUDA device is visible", where="flag --device", hint="--device cpu, or see nvidia-smi")
    return count


def count_gpu_ranks(config: ParallelConfig) -> int:
    """Ranks that the GPUs of this process have room for; 0 without a GPU."""
    gpus = count_gpus(config)
    if config.ranks_per_gpu > 1 and not gpus:
        raise UserError(
            "--ranks-per-gpu needs a GPU",
            where="flag --ranks-per-gpu",
            got=f"{config.ranks_per_gpu}, on the CPU",
            hint="leave it out: --processes sets the ranks of a CPU",
        )
    return gpus * config.ranks_per_gpu


def build_world(config: ParallelConfig, environment: RankEnvironment) -> World:
    """Add the device and its backend."""
    gpus, room = count_gpus(config), count_gpu_ranks(config)
    # srun may show each task only its own GPU. If two tasks see the same one, the roll call finds it.
    sees_own = gpus == 1 and environment.launcher == "srun"
    if gpus and environment.local_world_size > room and not sees_own:
        raise UserError(
            "more ranks than GPUs on this node",
            got=f"{environment.local_world_size} ranks, {gpus} GPUs",
            hint=f"--processes {room}, or --device cpu; --ranks-per-gpu N rehearses a run on more GPUs",
        )
    is_rehearsal = gpus > 0 and config.ranks_per_gpu > 1 and environment.world_size > 1
    number = 0 if sees_own else environment.local_rank // config.ranks_per_gpu
    return World(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        launcher=environment.launcher,
        host=socket.gethostname(),
        device=f"cuda:{number}" if gpus else "cpu",
        backend="nccl" if gpus and not is_rehearsal else "gloo",  # NCCL refuses two ranks on one GPU
        threads=threads_per_rank(config, 1 if environment.launcher == "srun" else environment.local_world_size),
        ranks_per_gpu=config.ranks_per_gpu if is_rehearsal else 1,
    )


def identify_job(environment: Mapping[str, str] = os.environ) -> str:
    """Empty if the launcher gives no identity.

    On one node, torchrun is identified by its agent process. On several nodes rank 0 may move to another agent, so the
    run id is used, which all agents share.
    """
    slurm_job = "-".join(environment.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID")).strip("-")
    run_id = environment.get(_RUN_ID, "")
    if run_id:
        has_other_nodes = environment.get("GROUP_WORLD_SIZE", "1") != "1"
        if has_other_nodes and run_id != _NO_RUN_ID:
            return f"torchrun {run_id} {slurm_job}".strip()
        pid = find_torchrun_agent()
        return f"torchrun {THIS_MACHINE.host} {THIS_MACHINE.boot_id} {pid} {THIS_MACHINE.process_start(pid)}"
    if slurm_job and "SLURM_PROCID" in environment:
        return f"srun {slurm_job}.{environment.get('SLURM_STEP_ID', '')}"
    return ""


def find_torchrun_agent() -> int:
    """The first ancestor process that torchrun did not start. A script may be between the rank and the agent."""
    pid = os.getppid()
    while _is_started_by_torchrun(pid):
        fields = stat_fields(pid)
        parent = int(fields[1]) if len(fields) > 1 else 0
        if parent <= 1:
            break
        pid = parent
    return pid


def _is_started_by_torchrun(pid: int) -> bool:
    try:
        names = [entry.partition(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    except OSError:
        return False
    return _RUN_ID.encode() in names
