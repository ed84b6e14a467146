"""A missing or unclear answer of Slurm's clients counts as unknown and refuses no job."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace

import pytest

from harness.slurm_answers import CONFIG, GPU_JOB, JOB, NODES, PARTITIONS, facts, refused
from paceline.errors import UserError
from paceline.integrations.slurm import facts as slurm_facts
from paceline.integrations.slurm.fit import find_problems
from paceline.integrations.slurm.request import as_sbatch_reads, as_srun_reads
from paceline.launch.job import JobSpec, SlurmFlags, parse_job, parse_time_s
from paceline.settings.declare import fields_of
from paceline.settings.values import Setting

MANY_DIGITS = "9" * 5000  # more than Python converts to a number
FIXED = CONFIG.replace("MaxNodeCount            = 8\n", "")
ELASTIC = FIXED + "ResumeProgram           = /usr/bin/resume\n"
LUA = CONFIG.replace("JobSubmitPlugins        = (null)", "JobSubmitPlugins        = lua")
SIX_NODES = replace(JOB, nodes=6)

NOT_KNOWN: dict[str, tuple[JobSpec, dict[str, str | None]]] = {
    "nodes that are powered down are not listed": (
        SIX_NODES,
        {"config": ELASTIC, "nodes": NODES.replace("main|4|16|64000|(null)|skylake,ib\n", "")},
    ),
    "GPU nodes that are powered down are not listed": (
        GPU_JOB,
        {"config": ELASTIC, "nodes": NODES.replace("gpu|2|64|512000|gpu:a100:4(S:0,1),shard:8|(null)\n", "")},
    ),
    "an elastic cluster that does not say how many nodes a partition has": (
        replace(JOB, nodes=7),
        {"config": ELASTIC, "partitions": PARTITIONS.replace(" TotalNodes=6", "")},
    ),
    "nodes not understood, then one line that is": (
        SIX_NODES,
        {"config": FIXED, "nodes": "main|1K|16|64000|(null)|a\nmain|6|2|256000|(null)|zen\n"},
    ),
    "nodes understood, then one line that is not": (
        SIX_NODES,
        {"config": FIXED, "nodes": "main|6|2|256000|(null)|zen\nmain|1K|16|64000|(null)|a\n"},
    ),
    "nodes of no partition": (replace(JOB, nodes=7), {"config": FIXED, "nodes": f"some notice\n{NODES}"}),
    "GPUs of a node": (GPU_JOB, {"nodes": "gpu|3|64|512000|gpu:a100:|(null)\n"}),
    "a number of nodes where more may register": (
        replace(JOB, nodes=2000),
        {"config": CONFIG.replace("= 8\n", "= 4096\n"), "node_count": "1K\n"},
    ),
    "how many nodes may register": (replace(JOB, nodes=99), {"config": CONFIG.replace("= 8\n", "= 1K\n")}),
    "a partition": (replace(JOB, partition="late"), {"partitions": f"{PARTITIONS}slurm_load_partitions: error\n"}),
    "whether there are other clusters": (replace(JOB, nodes=99), {"federation": None}),
    "default accounts of two clusters": (JOB, {"user": "physics\nelsewhere\n"}),
    "the default account of another cluster": (JOB, {"user": "elsewhere\n"}),
    "the default account where the user has several clusters": (
        replace(JOB, time="1-00:00:00"),
        {
            "user": "poor\n",
            "associations": "lab|poor||normal|normal|00:10:00|\nlab|rich||normal|normal||\nother|poor||normal|||\n",
        },
    ),
    "accounts": (JOB, {"associations": "sacctmgr: error: try later\n"}),
    "accounts, with a separator": (JOB, {"associations": "error|a\n"}),
    "an account next to others": (
        replace(JOB, account="late"),
        {"associations": "lab|physics||normal|normal||\nlab|late\n"},
    ),
    "a QOS next to others": (
        replace(JOB, qos="late"),
        {"qos": "normal|||\nlate\n", "associations": "lab|physics||normal,late|||\n"},
    ),
    "a limit of a QOS that replaces the one of the account": (
        replace(JOB, time="10:00:00"),
        {"associations": "lab|physics||normal|normal|01:00:00|\n", "qos": "normal||long enough|\n"},
    ),
    "a QOS that adds to those of the parent account": (
        replace(JOB, time="10:00:00"),
        {"associations": "lab|physics||+long||01:00:00|\n"},
    ),
    "the version, where lists may hold accounts below": (
        replace(JOB, partition="physics", account="optics", qos="long"),
        {"config": CONFIG.replace("22.05.8", "main"), "associations": "lab|optics||long|long||\n"},
    ),
    "a feature named all": (replace(JOB, constraint="all"), {"nodes": "main|6|16|64000|(null)|all\n"}),
    "a feature named none": (replace(JOB, constraint="none"), {"nodes": "main|6|16|64000|(null)|none\n"}),
    "a type of GPU that a plugin may translate": (replace(GPU_JOB, gpus="h100-80:4"), {"config": LUA}),
    "a gres that a plugin may translate": (replace(GPU_JOB, gres="gpu:big:4,fast:1"), {"config": LUA}),
    "a feature that a plugin may translate": (replace(JOB, constraint="fast"), {"config": LUA}),
    "an array that a plugin may change": (replace(JOB, array="0-5000"), {"config": LUA}),
    "no gres": (replace(JOB, gres="none"), {}),
    "no gres, in capitals": (replace(GPU_JOB, gres="NONE"), {}),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_unknown_facts_refuse_no_job(name: str) -> None:
    """An incomplete or unclear answer is not the answer `none`."""
    job, changed = NOT_KNOWN[name]
    assert refused(job, facts(**changed)) == []


def test_a_plugin_cannot_add_resources_that_no_node_has() -> None:
    """More GPUs, CPUs or nodes than exist stay refused."""
    assert refused(replace(GPU_JOB, gpus="any:9"), facts(config=LUA)) == ["gpus_per_node"]
    assert refused(replace(GPU_JOB, gres="gpu:any:9"), facts(config=LUA)) == ["gres"]
    assert refused(replace(JOB, cpus_per_task=65), facts(config=LUA)) == ["cpus_per_task"]


def test_an_elastic_cluster_that_lists_all_nodes_is_known() -> None:
    """Nodes that are listed while they are powered down are counted."""
    assert refused(replace(JOB, nodes=7), facts(config=ELASTIC)) == ["nodes"]


@pytest.mark.parametrize(
    ("variable", "job"),
    [
        ("SBATCH_OVERCOMMIT", replace(JOB, cpus_per_task=33)),
        ("SBATCH_THREADS_PER_CORE", replace(JOB, cpus_per_task=33)),
        ("SBATCH_CPUS_PER_GPU", replace(JOB, cpus_per_task=33)),
        ("SBATCH_MEM_PER_NODE", replace(JOB, mem="900G")),
        ("SBATCH_MEM_PER_CPU", replace(JOB, mem="900G")),
        ("SBATCH_MEM_PER_GPU", replace(JOB, mem="900G")),
        ("SBATCH_GRES", replace(GPU_JOB, gres="shard:9")),
        ("SBATCH_GRES", replace(GPU_JOB, gpus="9", gres="gpu:9")),
        ("SBATCH_GPUS", replace(GPU_JOB, gpus="v100:4")),
        ("SBATCH_GPUS_PER_NODE", replace(GPU_JOB, gpus="9")),
        ("SBATCH_GPUS_PER_TASK", replace(GPU_JOB, gpus="9")),
        ("SBATCH_TRES_PER_TASK", replace(GPU_JOB, gpus="9", cpus_per_task=33)),
        ("SBATCH_ARRAY_INX", replace(JOB, array="0-5000")),
        ("SBATCH_SIGNAL", replace(JOB, partition="physics", qos="long", time="")),
    ],
)
def test_settings_that_a_variable_of_sbatch_may_change_are_not_checked(variable: str, job: JobSpec) -> None:
    """sbatch's variables have priority over the script. Other mistakes are refused as before."""
    assert refused(job) != []
    assert refused(job, environment={variable: "1"}) == []
    assert refused(replace(job, partition="nix"), environment={variable: "1"}) == ["partition"]


def test_srun_may_overcommit_by_a_variable() -> None:
    """SLURM_OVERCOMMIT is the option --overcommit."""
    assert find_problems(as_srun_reads(1, 99, (), {"SLURM_OVERCOMMIT": "1"}), facts()) == []


def test_the_user_is_the_owner_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm counts jobs by user id. LOGNAME and USER may contain any name."""
    asked: list[list[str]] = []
    monkeypatch.setattr(slurm_facts, "_query", asked.append)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "ada")
    mine = pwd.getpwuid(os.getuid()).pw_name
    assert slurm_facts.ask_slurm().user == mine
    assert [command for command in asked if f"user={mine}" in command] != []


# --- Numbers that are too long ----------------------------------------------------------------------------------------

LONG_ANSWERS: dict[str, dict[str, str | None]] = {
    "array": {"config": CONFIG.replace("1001", MANY_DIGITS)},
    "nodes": {"nodes": f"main|{MANY_DIGITS}|1|1|(null)|(null)\n"},
    "gres": {"nodes": f"main|6|1|1|gpu:{MANY_DIGITS}|(null)\n"},
    "time": {"partitions": PARTITIONS.replace("1-00:00:00", MANY_DIGITS)},
    "version": {"config": CONFIG.replace("22.05.8", f"{MANY_DIGITS}.1")},
    "node count": {"node_count": f"{MANY_DIGITS}\n"},
    "nodes that may register": {"config": CONFIG.replace("= 8\n", f"= {MANY_DIGITS}\n")},
    "limits": {
        "associations": f"lab|physics||normal|normal|{MANY_DIGITS}|cpu={MANY_DIGITS}\n",
        "qos": f"normal||{MANY_DIGITS}|node={MANY_DIGITS}\n",
    },
}


@pytest.mark.parametrize("name", LONG_ANSWERS)
def test_a_number_of_thousands_of_digits_is_unknown(name: str) -> None:
    """It is no internal error either."""
    assert refused(JOB, facts(**LONG_ANSWERS[name])) == []


@pytest.mark.parametrize("text", [MANY_DIGITS, f"{MANY_DIGITS}:00:00", f"{MANY_DIGITS}-00"])
def test_a_time_of_thousands_of_digits_is_a_user_error(text: str) -> None:
    """Exit code 2, like any other text that is not a time."""
    with pytest.raises(UserError) as caught:
        parse_time_s(text)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nodes", MANY_DIGITS),
        ("time", MANY_DIGITS),
        ("mem", f"{MANY_DIGITS}G"),
        ("array", f"0-{MANY_DIGITS}"),
        ("gres", f"gpu:{MANY_DIGITS}"),
    ],
)
def test_a_setting_of_thousands_of_digits_is_a_user_error(name: str, value: str) -> None:
    """Every number of a job is checked as text first."""
    table = fields_of(SlurmFlags)
    values = {"processes_per_node": "1", name: value}
    settings = {name: Setting(table[name], (value,), "flag", "flag") for name, value in values.items()}
    with pytest.raises(UserError):
        parse_job(settings)


def test_requests_with_long_numbers_are_not_checked() -> None:
    """srun gets its options unchanged. Settings of a job may come from other sources."""
    for words in (("-c", MANY_DIGITS), ("--mem", MANY_DIGITS), ("--gres", f"gpu:{MANY_DIGITS}"), ("-t", MANY_DIGITS)):
        assert find_problems(as_srun_reads(1, 1, words, {}), facts()) == []
    for job in (
        replace(JOB, array=MANY_DIGITS),
        replace(JOB, mem=MANY_DIGITS),
        replace(JOB, gres=f"shard:{MANY_DIGITS}"),
    ):
        assert find_problems(as_sbatch_reads(job, {}), facts()) == []
