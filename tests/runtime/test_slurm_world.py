"""The rank of a task, from srun's variables."""

from __future__ import annotations

import os

import pytest

from paceline.errors import UserError
from paceline.runtime.detect import RankEnvironment, check_whole_job, read_nodes, read_rank_environment
from paceline.runtime.group import require_own_gpus
from paceline.runtime.resources import usable_cores
from paceline.runtime.slurm import count_granted_cpus, expand_counts, expand_hosts, read_slurm_task

STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
AGENT = {**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
AGENT |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "PACELINE_START": "agent"}


def test_lists_of_hosts_and_tasks() -> None:
    assert expand_hosts("n1") == ("n1",)
    assert expand_hosts("n[1-3,7],login,gpu[08-10]x") == (
        *("n1", "n2", "n3", "n7", "login", "gpu08x", "gpu09x", "gpu10x"),
    )
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="tasks per node"):
        expand_counts("many")


def test_one_task_per_rank() -> None:
    rank = read_rank_environment(STEP)
    assert rank is not None
    assert (rank.rank, rank.world_size, rank.local_rank, rank.local_world_size) == (3, 4, 1, 2)
    assert (rank.launcher, rank.store_host, rank.attempt) == ("srun", "n1", 1)
    again = read_rank_environment({**STEP, "SLURM_RESTART_COUNT": "2"})
    assert again is not None
    assert again.attempt == 3
    assert again.store_port != rank.store_port


def test_one_agent_per_node() -> None:
    assert read_rank_environment(AGENT) is None
    nodes = read_nodes(AGENT)
    assert (nodes.count, nodes.own, nodes.host) == (2, 1, "n1")
    with pytest.raises(UserError, match="one agent per node"):
        read_nodes({**STEP, "PACELINE_START": "agent"})


def test_a_shell_in_a_job_is_a_single_machine() -> None:
    shell = {**AGENT, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    shell |= {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    del shell["PACELINE_START"]
    assert read_rank_environment(shell) is None
    assert read_nodes(shell).count == 1
    batch = {name: value for name, value in STEP.items() if "STEP" not in name}
    assert read_slurm_task(batch) is None
    assert read_slurm_task({**STEP, "SLURM_STEP_ID": "4294967291"}) is None


def test_a_job_of_two_nodes_does_not_train_on_one() -> None:
    job = {"SLURM_JOB_ID": "71", "SLURM_JOB_NUM_NODES": "2"}
    check_whole_job(None, {**job, "SLURM_JOB_NUM_NODES": "1"})
    check_whole_job(None, {**AGENT, **job})
    check_whole_job(RankEnvironment(2, 4, 0, 2, "torchrun"), job)
    with pytest.raises(UserError, match="the job has 2 nodes") as caught:
        check_whole_job(None, job)
    assert "srun --ntasks-per-node=1" in str(caught.value.hint)
    with pytest.raises(UserError, match="the job has 2 nodes") as caught:
        check_whole_job(RankEnvironment(0, 2, 0, 2, "torchrun"), job)
    assert "torchrun --nnodes=2" in str(caught.value.hint)


def test_two_ranks_on_one_gpu_are_named() -> None:
    require_own_gpus(["a, GPU 1", "a, GPU 2", "b, GPU 1"])
    with pytest.raises(UserError, match="2 ranks were given the same GPU") as caught:
        require_own_gpus(["a, GPU 1", "b, GPU 1", "a, GPU 1"])
    assert caught.value.got == "rank 0, 2"


def test_an_incomplete_environment_is_refused() -> None:
    for name in STEP:
        if name in ("SLURM_STEP_ID", "SLURM_PROCID"):
            continue
        with pytest.raises(UserError, match="Slurm's environment"):
            read_slurm_task({key: value for key, value in STEP.items() if key != name})


@pytest.mark.parametrize(
    ("job", "cpus"),
    [
        ({}, None),
        ({**STEP, "SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "64"}, 3),
        ({**STEP, "SLURM_CPUS_ON_NODE": "8"}, 4),  # two tasks share them
        ({**AGENT, "SLURM_CPUS_ON_NODE": "8"}, 8),
        ({"SLURM_JOB_ID": "71", "SLURM_CPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "2"}, 8),  # a batch script
        ({**STEP, "SLURM_CPUS_ON_NODE": "many"}, None),
    ],
)
def test_cpus_that_slurm_granted(job: dict[str, str], cpus: int | None) -> None:
    assert count_granted_cpus(job) == cpus


def test_the_allocation_counts_if_the_site_does_not_bind_tasks_to_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert usable_cores({}) <= cores
    assert usable_cores({**STEP, "SLURM_CPUS_PER_TASK": "1"}) == 1
    assert usable_cores({**STEP, "SLURM_CPUS_PER_TASK": "1000"}) <= cores
