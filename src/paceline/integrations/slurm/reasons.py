"""Explain why a Slurm job is pending, and whether it can start at all."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    """What a pending reason means. `never`: the job does not start without a change by a person."""

    reason: str
    hint: str = ""
    never: bool = False

    def __str__(self) -> str:
        end = "; it will not start by itself" if self.never else ""
        return self.reason + end + (f": {self.hint}" if self.hint else "")


_JOBS_END = "it starts when jobs end that use the same account or QOS"
_REASONS = {
    "Priority": Waiting("jobs with a higher priority are first"),
    "Resources": Waiting("its nodes, CPUs or GPUs are in use"),
    "Dependency": Waiting("it waits for another job"),
    "DependencyNeverSatisfied": Waiting("the job it waits for has failed", "cancel it and submit again", never=True),
    "BeginTime": Waiting("its start time is not reached; a requeued job waits about two minutes"),
    "JobHeldUser": Waiting("it is held", "scontrol release JOB", never=True),
    "JobHeldAdmin": Waiting("an administrator holds it", "ask the site's support", never=True),
    "JobHoldMaxRequeue": Waiting("it was requeued too often and is held", "scontrol release JOB", never=True),
    "JobArrayTaskLimit": Waiting("its array has reached the limit of running tasks"),
    "Licenses": Waiting("the licenses it needs are in use"),
    "Reservation": Waiting("its reservation has not started"),
    "ReservationDeleted": Waiting("its reservation was deleted", "submit without --reservation", never=True),
    "Prolog": Waiting("the site prepares its nodes"),
    "Cleaning": Waiting("its earlier start is being cleaned up"),
    "NodeDown": Waiting("a node it needs is down", "sinfo -R shows why"),
    "ReqNodeNotAvail": Waiting("a node it needs is down, drained or reserved", "sinfo -R shows why"),
    "BadConstraints": Waiting("no node has what it requests", "sinfo -o '%P %D %c %G %f' lists them", never=True),
    "PartitionDown": Waiting("its partition is down until an administrator opens it", "another --partition"),
    "PartitionInactive": Waiting("its partition is inactive until an administrator opens it", "another --partition"),
    "PartitionNodeLimit": Waiting("its partition does not allow this many nodes", "fewer --nodes", never=True),
    "PartitionTimeLimit": Waiting("its partition does not allow this much time", "a shorter --time", never=True),
    "PartitionConfig": Waiting("its partition does not allow what it requests", "another --partition", never=True),
    "AccountNotAllowed": Waiting("its account may not use the partition", "another --account", never=True),
    "QOSNotAllowed": Waiting("its QOS may not use the partition", "another --qos", never=True),
    "InvalidAccount": Waiting("its account is not valid", "sacctmgr show assoc user=$USER lists yours", never=True),
    "InvalidQOS": Waiting("its QOS is not valid", "sacctmgr show qos lists them", never=True),
    "JobLaunchFailure": Waiting("it could not be started on its node", "scontrol release JOB", never=True),
    "MaxMemPerLimit": Waiting("the partition does not allow this much memory", "a smaller --mem", never=True),
    "DeadLine": Waiting("its deadline cannot be met", "submit again without --deadline", never=True),
    "SystemFailure": Waiting("Slurm or a node failed while it started", "scontrol release JOB", never=True),
    "BurstBufferResources": Waiting("the burst buffer it needs is in use"),
    "BurstBufferStageIn": Waiting("its data is copied into the burst buffer"),
    "BurstBufferOperation": Waiting("the burst buffer failed", "ask the site's support", never=True),
    "FedJobLock": Waiting("the clusters of the federation decide which one starts it"),
    "SchedDefer": Waiting("Slurm looks for free nodes in its next round"),
    "MaxPoweredUpNodes": Waiting("the site's limit of powered-up nodes is reached"),
    "QOSUsageThreshold": Waiting("its QOS has used more than its share"),
}
# Limits have a name for each kind of resource. Limits of one job are permanent; limits of a group end with other jobs.
_PATTERNS = (
    (r"(QOS|Assoc)Max\w*PerJob\w*|(QOS|Assoc)Max\w*PerNode", "one job may not request this much", "request less", True),
    (r"QOSMin\w*", "one job must request more", "another --qos", True),
    (r"(QOS|Assoc)Grp\w*RunMin\w*", "running jobs of the account or QOS have too much time left", _JOBS_END, False),
    (r"(QOS|Assoc)Grp\w*Minutes\w*", "the account or QOS has used its time", "ask the site's support", False),
    (r"(QOS|Assoc|Association)\w*|Max\w+PerAccount", "the account or QOS has reached its limit", _JOBS_END, False),
    (r"Nodes required for job are DOWN.*", "nodes it needs are down or drained", "sinfo -R shows why", False),
    # Slurm sometimes reports a sentence instead of a name.
    (r"Job's account .*", "its account may not use the partition", "another --account or --partition", True),
    (r"Job's QOS .*", "its QOS may not use the partition", "another --qos or --partition", True),
    (r".*requeued held|.*held state", "it could not be started and is held", "scontrol release JOB", True),
)


def explain_reason(reason: str) -> Waiting | None:
    """None for an unknown reason: a site may have its own."""
    name = reason.strip("()").partition(",")[0].strip()
    if name in _REASONS:
        return _REASONS[name]
    for pattern, reason, hint, never in _PATTERNS:
        if re.fullmatch(pattern, name):
            return Waiting(reason, hint, never)
    return None
