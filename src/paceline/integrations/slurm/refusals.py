"""Hints for jobs that sbatch refuses, chosen by its error message."""

from __future__ import annotations

import re

_PARTITIONS = "sinfo -o '%P %a %l %D %c %G' lists partitions with their limits, nodes, CPUs and GPUs"
_ACCOUNTS = "sacctmgr show assoc user=$USER format=account,partition,qos lists yours"
_CONTROLLER = "scontrol ping shows whether the controller is up; try again when it is"
# The first match is used. Slurm's messages change slightly between versions, so the patterns match only their core.
_HINTS = (
    (r"account or account/partition combination|invalid account", f"another --account: {_ACCOUNTS}"),
    (r"qos", f"another --qos: {_ACCOUNTS}"),
    (r"group not permitted|not permitted to use this partition", f"another --partition: {_PARTITIONS}"),
    (r"invalid partition|no partition specified", f"another --partition: {_PARTITIONS}"),
    (r"partition.*not available|partition.*(down|inactive|drain)", f"another --partition: {_PARTITIONS}"),
    (r"time limit", f"a shorter --time: {_PARTITIONS}"),
    (r"node count|too many nodes", f"another --nodes: {_PARTITIONS}"),
    (
        r"memory specification|memory required",
        "a smaller --mem: sinfo -o '%P %m' lists the memory of nodes in megabytes",
    ),
    (r"generic resource|gres|gpu", "other GPUs: sinfo -o '%P %G' lists those of each partition"),
    (r"feature specification", "another --constraint: sinfo -o '%P %f' lists features"),
    (r"reservation", "another --reservation: scontrol show reservation lists them"),
    (r"node configuration is not available|cpu count", f"fewer CPUs or GPUs per node, or fewer nodes: {_PARTITIONS}"),
    (r"node name", "sinfo --Node lists nodes"),
    (r"job array", "a smaller --array: scontrol show config | grep MaxArraySize"),
    (r"policy limit|limit.*(size|resources)|submit limit", "wait until your other jobs end, or ask the site's support"),
    (r"requeue", "remove the requeue line; ask the site's support whether jobs may be requeued"),
    (r"credential|munge|authentication", "munge -n | unmunge shows whether munge works; contact the site's support"),
    (r"unable to contact|connection refused|connect failure|socket timed out|timed out|zero bytes", _CONTROLLER),
    (r"configuration source|slurm\.conf", "no cluster is configured here: log in to the cluster, or set SLURM_CONF"),
    (r"access.*denied|permission", "ask the site's support"),
    (r"invalid (option|argument)|unrecognized option|illegal", "paceline submit slurm ... --dry-run prints the script"),
)
# The job may be in the queue: perhaps only the answer was lost.
_ANSWER_LOST = re.compile(r"socket timed out|timed out", re.IGNORECASE)


def hint_for(message: str) -> str | None:
    """None for an unknown message, for example from a plugin of the site."""
    found = next((hint for pattern, hint in _HINTS if re.search(pattern, message, re.IGNORECASE)), None)
    if found is not None and _ANSWER_LOST.search(message):
        return f"squeue --me shows whether the job is in the queue\n{found}"
    return found
