"""The clients' answers of an invented Slurm cluster, and the settings of a job that it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.integrations.slurm.facts import SlurmFacts, read_facts
from paceline.integrations.slurm.fit import find_problems
from paceline.integrations.slurm.request import as_sbatch_reads
from paceline.launch.job import JobSpec

CONFIG = """\
Configuration data as of 2026-11-16T23:00:00
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
CliFilterPlugins        = (null)
ClusterName             = lab
JobSubmitPlugins        = (null)
MaxArraySize            = 1001
MaxNodeCount            = 8
PrivateData             = none
SLURM_VERSION           = 22.05.8
"""
PARTITIONS = """\
PartitionName=main AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A DefaultTime=01:00:00 MaxNodes=UNLIMITED \
MaxTime=1-00:00:00 MinNodes=0 MaxCPUsPerNode=UNLIMITED Nodes=n[1-6] State=UP TotalNodes=6
PartitionName=gpu AllowAccounts=ALL AllowQos=ALL Default=NO QoS=N/A DefaultTime=NONE MaxNodes=3 MaxTime=UNLIMITED \
MinNodes=2 MaxCPUsPerNode=32 Nodes=g[1-2],h1 State=UP TotalNodes=3
PartitionName=physics AllowAccounts=physics AllowQos=long Default=NO QoS=N/A DefaultTime=00:01:00 MaxNodes=UNLIMITED \
MaxTime=2-00:00:00 MinNodes=0 MaxCPUsPerNode=UNLIMITED Nodes=n[1-6] State=UP TotalNodes=6
PartitionName=broken DenyAccounts=student AllowQos=ALL Default=NO QoS=N/A DefaultTime=NONE MaxNodes=UNLIMITED \
MaxTime=UNLIMITED MinNodes=0 MaxCPUsPerNode=UNLIMITED Nodes=n[1-6] State=DOWN TotalNodes=6
PartitionName=gone AllowAccounts=ALL AllowQos=ALL Default=NO QoS=N/A DefaultTime=NONE MaxNodes=UNLIMITED \
MaxTime=UNLIMITED MinNodes=0 MaxCPUsPerNode=UNLIMITED Nodes=n[1-6] State=INACTIVE TotalNodes=6
"""
NODES = """\
main|4|16|64000|(null)|skylake,ib
main|2|32|256000|(null)|zen
gpu|2|64|512000|gpu:a100:4(S:0,1),shard:8|(null)
gpu|1|64|512000|gpu:h100:8(S:0-1)|(null)
physics|6|16|64000|(null)|(null)
broken|6|16|64000|(null)|(null)
gone|6|16|64000|(null)|(null)
"""
ANSWERS: dict[str, str | None] = {
    "config": CONFIG,
    "partitions": PARTITIONS,
    "nodes": NODES,
    "node_count": "8\n",
    "federation": "",
    "associations": "lab|physics||normal,long|normal|2-00:00:00|\n"
    "lab|student|main|normal|normal||\nother|elsewhere||normal|||\n",
    "qos": "normal|||\nlong|PartitionTimeLimit|7-00:00:00|node=4\nroot|||\n",
    "user": "physics\n",
}
JOB = JobSpec(nodes=2, ranks_per_node=4, cpus_per_task=4, time="01:00:00")
GPU_JOB = replace(JOB, partition="gpu", gpus="4", cpus_per_task=8)


def facts(**changed: str | None) -> SlurmFacts:
    return read_facts({**ANSWERS, **changed}, "ada")


def without_accounting() -> SlurmFacts:
    config = CONFIG.replace("/slurmdbd", "/none").replace("associations,limits,qos", "none")
    return facts(config=config, associations=None, qos=None, user=None)


def refused(job: JobSpec, known: SlurmFacts | None = None, environment: Mapping[str, str] | None = None) -> list[str]:
    """The settings that are refused."""
    request = as_sbatch_reads(job, environment or {})
    return [problem.setting for problem in find_problems(request, known or facts())]
