"""Jobs that a cluster can never start are refused with its limits. In doubt, jobs are not refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.slurm_answers import ANSWERS, CONFIG, GPU_JOB, JOB, PARTITIONS, facts, refused, without_accounting
from paceline.errors import UserError
from paceline.integrations.slurm.facts import Gres, SlurmFacts, read_facts, read_gres
from paceline.integrations.slurm.fit import describe_closed, find_problems, require_possible
from paceline.integrations.slurm.request import as_sbatch_reads, as_srun_reads
from paceline.launch.job import JobSpec

IMPOSSIBLE: dict[str, tuple[JobSpec, list[str]]] = {
    "more nodes than the default partition has": (replace(JOB, nodes=7), ["nodes"]),
    "more nodes with so many CPUs than there are": (replace(JOB, nodes=3, cpus_per_task=20), ["nodes"]),
    "more nodes than a job may have": (replace(GPU_JOB, nodes=4), ["nodes"]),
    "fewer nodes than a job must have": (replace(GPU_JOB, nodes=1), ["nodes"]),
    "more CPUs than a node has": (replace(JOB, cpus_per_task=33), ["cpus_per_task"]),
    "more CPUs, one task per rank": (replace(JOB, start="ranks", cpus_per_task=9), ["cpus_per_task"]),
    "more CPUs than a job may have on a node": (replace(GPU_JOB, cpus_per_task=33), ["cpus_per_task"]),
    "more GPUs than a node has": (replace(GPU_JOB, gpus="9"), ["gpus_per_node"]),
    "more GPUs of a type than a node has": (replace(GPU_JOB, gpus="a100:5"), ["gpus_per_node"]),
    "a type of GPU that no node has": (replace(GPU_JOB, gpus="v100:1"), ["gpus_per_node"]),
    "GPUs by gres": (replace(GPU_JOB, gpus="9", gres="gpu:9"), ["gres"]),
    "another gres": (replace(GPU_JOB, gres="shard:9"), ["gres"]),
    "nodes of two types of GPU": (replace(GPU_JOB, gpus="h100:4"), ["nodes"]),
    "GPUs on nodes without": (replace(JOB, gpus="1"), ["gpus_per_node"]),
    "more memory than a node has": (replace(JOB, mem="251G"), ["mem"]),
    "more memory, in megabytes": (replace(JOB, mem="256001"), ["mem"]),
    "a feature that no node has": (replace(JOB, constraint="zem"), ["constraint"]),
    "more time than the partition allows": (replace(JOB, time="1-00:00:01"), ["time"]),
    "a partition that is not there": (replace(JOB, partition="gpus"), ["partition"]),
    "a partition that takes no jobs": (replace(JOB, partition="gone"), ["partition"]),
    "an account of others": (replace(JOB, account="elsewhere"), ["account"]),
    "an account that is denied": (replace(JOB, account="student", partition="broken"), ["partition"]),
    "an account for another partition": (replace(GPU_JOB, account="student"), ["partition"]),
    "a QOS that is not there": (replace(JOB, qos="normall"), ["qos"]),
    "a QOS of others": (replace(JOB, qos="root"), ["qos"]),
    "a QOS that the partition does not allow": (replace(JOB, partition="physics", qos="normal"), ["qos"]),
    "more time than the account allows": (replace(GPU_JOB, time="3-00:00:00"), ["time"]),
    "more nodes than the QOS allows": (replace(JOB, nodes=5, qos="long"), ["nodes"]),
    "an array that is too large": (replace(JOB, array="0-1001%4"), ["array"]),
    "a default limit shorter than the notice": (
        replace(JOB, partition="physics", qos="long", time="", signal_notice_s=60),
        ["time"],
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_job_is_refused_by_name(name: str) -> None:
    """Exactly the settings that the cluster cannot give are named."""
    job, settings = IMPOSSIBLE[name]
    assert refused(job) == settings


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ({"gpus_per_node": "flag --gpus-per-node"}, ["--gpus-per-node 4"]),
        (
            {"gpus_per_node": "flag --gpus-per-node", "cpus_per_task": "flag --cpus-per-task"},
            ["--gpus-per-node 4", "48 CPUs on a node (--cpus-per-task 48)"],
        ),
    ],
    ids=["CPUs follow from GPUs", "CPUs were asked for"],
)
def test_missing_gpus_are_named_before_cpus(where: dict[str, str], named: list[str]) -> None:
    """Without --cpus-per-task a job requests CPUs for each of its GPUs. Their number is not a separate reason."""
    job = replace(JOB, gpus="4", cpus_per_task=48)
    with pytest.raises(UserError) as caught:
        require_possible(as_sbatch_reads(job, {}), facts(), where)
    assert str(caught.value.got).splitlines() == named


def test_a_limit_of_the_account_counts_all_nodes() -> None:
    """cpu=96 is for the complete job. A QOS without a limit of CPUs does not change it."""
    job = replace(GPU_JOB, nodes=3, cpus_per_task=32)
    tight = facts(associations="lab|physics||normal,long|||cpu=95,gres/gpu=11\n")
    assert refused(job, tight) == ["cpus_per_task", "gpus_per_node"]
    assert refused(job, facts(associations="lab|physics||normal,long|||cpu=96,gres/gpu=12\n")) == []
    limits_of_jobs = facts(config=CONFIG.replace(",limits", ""), associations="lab|physics||normal|||cpu=1\n")
    assert refused(job, limits_of_jobs) == [], "not enforced"


def test_an_unknown_qos_may_be_any_of_the_users() -> None:
    """Without a default QOS Slurm selects one, and the largest of their limits applies."""
    choice = facts(associations="lab|physics||normal,long||2-00:00:00|\n")
    assert refused(replace(GPU_JOB, time="3-00:00:00"), choice) == []
    assert refused(replace(GPU_JOB, time="8-00:00:00"), choice) == ["time"]
    assert refused(replace(JOB, time="1-12:00:00"), choice) == [], "long may exceed the limit of the partition"


POSSIBLE: dict[str, JobSpec] = {
    "a plain job": JOB,
    "as many nodes as there are": replace(JOB, nodes=6),
    "the largest nodes": replace(JOB, cpus_per_task=32),
    "two partitions, one of which fits": replace(JOB, partition="main,gpu", gpus="4"),
    "two partitions, one of which is not there": replace(JOB, partition="main,nowhere"),
    "the longest time": replace(JOB, time="1-00:00:00"),
    "no time": replace(JOB, time=""),
    "GPUs without a type": replace(GPU_JOB, gpus="4", nodes=3),
    "a type in other letters": replace(GPU_JOB, gpus="A100:4"),
    "all memory": replace(JOB, mem="0"),
    "a feature": replace(JOB, constraint="zen"),
    "a feature in an expression": replace(JOB, constraint="zen|nothing"),
    "an account in capitals": replace(JOB, account="Physics"),
    "a QOS that lifts the limit of time": replace(JOB, time="2-00:00:00", qos="long"),
    "a time that Slurm may shorten": replace(JOB, time="9-00:00:00", sbatch=("--time-min=60",)),
    "more ranks than CPUs on purpose": replace(JOB, cpus_per_task=99, sbatch=("--overcommit",)),
    "another cluster": replace(JOB, nodes=99, sbatch=("--clusters=big",)),
    "another cluster, short": replace(JOB, nodes=99, sbatch=("-Mbig",)),
    "whole nodes": replace(JOB, sbatch=("--exclusive",)),
    "a partition that is down": replace(JOB, partition="broken", account="physics"),
    "a partition by reservation": replace(GPU_JOB, partition="", reservation="course"),
    "the largest array": replace(JOB, array="0-1000:3%2000"),
}


@pytest.mark.parametrize("name", POSSIBLE)
def test_a_possible_job_is_not_refused(name: str) -> None:
    """No job is refused that Slurm may start."""
    assert refused(POSSIBLE[name]) == []


@pytest.mark.parametrize(
    "known",
    [
        facts(federation="Federation: all\nSelf: lab\n"),
        read_facts({**ANSWERS, "config": None}),
        read_facts({}),
        SlurmFacts(),
    ],
    ids=["federation", "no config", "no answers", "nothing"],
)
def test_without_certain_facts_nothing_is_refused(known: SlurmFacts) -> None:
    """Other clusters of a federation may start the job. An unreachable controller is no evidence."""
    assert [name for name, (job, _) in IMPOSSIBLE.items() if refused(job, known)] == []


def test_each_missing_answer_skips_only_its_own_checks() -> None:
    """For example, a site without sinfo still refuses a partition that does not exist."""
    assert refused(replace(JOB, nodes=99, partition="nix"), facts(nodes=None)) == ["partition"]
    assert refused(replace(JOB, nodes=99), facts(nodes=None)) == []
    assert refused(replace(JOB, account="elsewhere"), facts(partitions=None)) == ["account"]
    assert refused(replace(JOB, account="elsewhere", qos="nix"), facts(associations=None)) == ["qos"]
    assert refused(replace(JOB, qos="nix"), facts(qos=None)) == ["qos"], "the user's associations do not have it"
    assert refused(replace(JOB, time="9-00:00:00"), facts(qos=None)) == [], "its QOS may lift the limit"


def test_private_partitions_and_nodes_are_unknown() -> None:
    """A site that hides them shows only some of them."""
    hidden = facts(config=CONFIG.replace("= none", "= partitions"))
    assert refused(replace(JOB, partition="secret"), hidden) == []
    hidden = facts(config=CONFIG.replace("= none", "= jobs,nodes"))
    assert refused(replace(JOB, nodes=99), hidden) == []
    assert refused(replace(JOB, partition="nix"), hidden) == ["partition"]


def test_a_plugin_of_the_site_may_change_the_job() -> None:
    """With job_submit/lua a job is refused only if no node of the cluster can provide the resources."""
    plugin = facts(config=CONFIG.replace("JobSubmitPlugins        = (null)", "JobSubmitPlugins = lua"))
    for name in ("a partition that is not there", "an account of others", "more time than the partition allows"):
        assert refused(IMPOSSIBLE[name][0], plugin) == []
    assert refused(replace(JOB, nodes=99), plugin) == ["nodes"]
    harmless = facts(config=CONFIG.replace("(null)", "require_timelimit"))
    assert refused(replace(JOB, partition="nix"), harmless) == ["partition"]


def test_nodes_that_may_register_later_are_counted() -> None:
    """Dynamic nodes: MaxNodeCount is above the number of nodes."""
    growing = facts(config=CONFIG.replace("MaxNodeCount            = 8", "MaxNodeCount = 100"))
    assert refused(replace(JOB, nodes=99), growing) == []


def test_without_accounting_accounts_and_qos_are_free_text() -> None:
    """Only a partition's own list of accounts counts."""
    plain = without_accounting()
    assert refused(replace(JOB, account="any", qos="any"), plain) == []
    assert refused(replace(JOB, account="any", partition="physics"), plain) == ["account"]
    assert refused(replace(JOB, time="9-00:00:00", qos="any"), plain) == ["time"]


def test_a_user_without_an_account() -> None:
    """If jobs need one."""
    assert refused(JOB, facts(associations="")) == ["account"]


def test_lists_of_accounts_may_hold_accounts_below_them() -> None:
    """Newer versions of Slurm include them, so an account that is not listed is not refused."""
    job = replace(JOB, account="any", partition="physics")
    config = CONFIG.replace("/slurmdbd", "/none").replace("associations,limits,qos", "none")
    newer = facts(config=config.replace("22.05.8", "24.05.1"), associations=None, qos=None, user=None)
    assert refused(job, newer) == []


def test_variables_of_sbatch_have_priority_over_the_script() -> None:
    """SBATCH_PARTITION is used, and the screen says so."""
    assert refused(replace(JOB, partition="main"), environment={"SBATCH_PARTITION": "nix"}) == ["partition"]
    assert refused(replace(JOB, partition="nix"), environment={"SBATCH_PARTITION": "main"}) == []
    assert refused(replace(JOB, nodes=99), environment={"SLURM_CLUSTERS": "big"}) == []
    request = as_sbatch_reads(JOB, {"SBATCH_PARTITION": "nix"})
    with pytest.raises(UserError) as caught:
        require_possible(request, facts(), {"partition": "flag --partition"})
    assert caught.value.where == "variable SBATCH_PARTITION"
    assert (caught.value.hint or "").startswith("unset SBATCH_PARTITION")


def test_no_default_partition() -> None:
    """Then the user must name one."""
    assert refused(JOB, facts(partitions=PARTITIONS.replace("Default=YES", "Default=NO"))) == ["partition"]


def test_the_screen_names_the_limits_of_the_cluster() -> None:
    """All problems on one screen: what, where from, got, allowed, try."""
    job = replace(GPU_JOB, nodes=9, time="8-00:00:00")
    with pytest.raises(UserError) as caught:
        require_possible(as_sbatch_reads(job, {}), facts(), {"nodes": "flag --nodes", "time": "sites.yaml, line 2"})
    error = caught.value
    assert error.where == "flag --nodes and sites.yaml, line 2"
    assert error.got == "--nodes 9\n8-00:00:00 in all"
    assert error.allowed == "up to 3 for a job in partition gpu\nup to 2-00:00:00"
    assert "--nodes 3" in (error.hint or "")
    assert len(error.screen().splitlines()) <= 12


def test_another_possible_partition_is_named() -> None:
    """GPUs requested in a partition without GPUs."""
    with pytest.raises(UserError) as caught:
        require_possible(as_sbatch_reads(replace(JOB, gpus="4"), {}), facts(), {})
    assert "--partition gpu" in (caught.value.hint or "")


def test_a_partition_that_is_down_gives_a_warning() -> None:
    """It accepts jobs, so the job is not refused. The user learns that it waits."""
    assert "broken" in describe_closed(as_sbatch_reads(POSSIBLE["a partition that is down"], {}), facts())
    assert describe_closed(as_sbatch_reads(JOB, {}), facts()) == ""


def test_gres_as_slurm_writes_it() -> None:
    """Types, sockets with commas, counts with a unit, and no count."""
    assert read_gres("gpu:a100:4(S:0,1),shard:8") == (Gres("gpu", "a100", 4), Gres("shard", "", 8))
    assert read_gres("gpu") == (Gres("gpu", "", 1),)
    assert read_gres("gpu:1g.5gb:7(IDX:0-6)") == (Gres("gpu", "1g.5gb", 7),)
    assert read_gres("tmp:no_consume:2K") == (Gres("tmp", "", 2048),)
    assert read_gres("(null)") == ()


@pytest.mark.parametrize(
    ("nodes", "tasks", "words", "environment", "settings"),
    [
        (7, 1, (), {}, ["nodes"]),
        (6, 1, (), {}, []),
        (1, 33, (), {}, ["cpus_per_task"]),
        (1, 4, ("--cpus-per-task=9",), {}, ["cpus_per_task"]),
        (1, 4, ("-c", "8"), {}, []),
        (2, 1, ("--partition=gpu", "--gpus-per-node=9"), {}, ["gpus_per_node"]),
        (2, 1, ("-pgpu", "--gpus-per-node", "a100:4"), {}, []),
        (1, 1, ("-p", "nix", "--time=5"), {}, ["partition"]),
        (1, 1, ("--time=2-0",), {}, ["time"]),
        (1, 1, (), {"SLURM_PARTITION": "nix"}, ["partition"]),
        (1, 1, ("--partition=main",), {"SLURM_PARTITION": "nix"}, []),
        (1, 1, ("--partition=main",), {"SBATCH_PARTITION": "nix"}, []),
        (99, 1, ("-M", "big"), {}, []),
        (99, 1, ("--clusters=big",), {}, []),
        (1, 99, ("--overcommit",), {}, []),
    ],
)
def test_options_of_srun_are_read_as_srun_reads_them(
    nodes: int, tasks: int, words: tuple[str, ...], environment: dict[str, str], settings: list[str]
) -> None:
    """`paceline doctor --launch slurm` uses srun, whose options have priority over variables."""
    request = as_srun_reads(nodes, tasks, words, environment)
    assert [problem.setting for problem in find_problems(request, facts())] == settings
