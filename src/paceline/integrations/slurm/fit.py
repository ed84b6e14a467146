"""Check whether this cluster can ever start a job: compare the job's request with what Slurm reports. Pure.

A job that is refused here would be refused by sbatch or wait forever. If the facts are incomplete, the job passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from paceline.errors import UserError
from paceline.integrations.slurm.facts import Gres, NodeKind, Partition, SlurmFacts, read_memory_mb, read_number
from paceline.integrations.slurm.request import Problem, ResourceRequest, nearest, slurm_time, some_names
from paceline.integrations.slurm.rights import check_rights, may_exceed

_GPU_SETTINGS = ("gpus_per_node", "gres")


def require_possible(request: ResourceRequest, facts: SlurmFacts, where: Mapping[str, str]) -> None:
    """Raise one error for everything that the cluster cannot provide. `where`: the origin of each setting."""
    problems = find_problems(request, facts)
    if "cpus_per_task" not in where and any(item.setting in _GPU_SETTINGS for item in problems):
        # The number of CPUs was derived from the number of GPUs, so the GPUs are the reason.
        problems = [item for item in problems if item.setting != "cpus_per_task"]
    if not problems:
        return
    named = {name: f"variable {variable}" for name, variable in request.from_variables.items()}
    places = ({**where, **named}.get(item.setting) for item in problems)
    raise UserError(
        problems[0].what if len(problems) == 1 else "this cluster cannot start the job",
        where=" and ".join(dict.fromkeys(place for place in places if place)) or None,
        got="\n".join(item.got for item in problems),
        allowed="\n".join(item.allowed for item in problems),
        hint="\n".join(dict.fromkeys(line for item in problems for line in _hint(item, request))) or None,
    )


def _hint(problem: Problem, request: ResourceRequest) -> list[str]:
    """sbatch prefers a variable to its script, so a flag alone does not help."""
    variable = request.from_variables.get(problem.setting)
    return [f"unset {variable}", *problem.hint.splitlines()] if variable else problem.hint.splitlines()


def find_problems(request: ResourceRequest, facts: SlurmFacts) -> list[Problem]:
    """Empty if the job can start, or if that is unknown."""
    if request.may_leave_cluster or facts.is_federated:
        return []
    if facts.rewrites_jobs:
        request = request.without_names()
    problems = _check_array(request, facts)
    if facts.partitions is None:
        return problems if facts.rewrites_jobs else problems + check_rights(request, None, facts)
    candidates, unknown = _candidates(request, facts)
    if unknown is not None:
        return [*problems, unknown]
    rows = [(partition, _check_partition(request, partition, facts)) for partition in candidates]
    if any(not found for _, found in rows):
        return problems
    found = min((found for _, found in rows), key=len)
    if other := _other_partition(request, {row.name for row in candidates}, facts):
        found = [replace(problem, hint=_join(problem.hint, f"--partition {other}")) for problem in found]
    return problems + found


def describe_closed(request: ResourceRequest, facts: SlurmFacts) -> str:
    """A note if the partition accepts the job but does not start jobs now; otherwise empty."""
    if request.may_leave_cluster or facts.is_federated or facts.rewrites_jobs or not facts.partitions:
        return ""
    candidates, _ = _candidates(request, facts)
    if candidates and all(partition.state == "DOWN" for partition in candidates):
        names = ", ".join(partition.name for partition in candidates)
        return f"partition {names} is down; the job waits until an administrator opens it"
    return ""


# --- Where ------------------------------------------------------------------------------------------------------------


def _candidates(request: ResourceRequest, facts: SlurmFacts) -> tuple[list[Partition], Problem | None]:
    """Partitions that Slurm may choose for the job; any of them is enough."""
    partitions = facts.partitions or {}
    if facts.rewrites_jobs or (request.spec.reservation and not request.partitions):
        return list(partitions.values()), None  # a job submit plugin or the reservation decides
    allowed = some_names(partitions)
    if not request.partitions:
        default = [partition for partition in partitions.values() if partition.is_default]
        if default:
            return default, None
        got = "no --partition, and the cluster has no default one"
        hint = f"--partition {next(iter(partitions))}"
        return [], Problem("partition", "which partition?", got, allowed, hint)
    known = [partitions[name] for name in request.partitions if name in partitions]
    if known:
        return known, None
    return [], Problem(
        "partition",
        "there is no such partition",
        request.named("partition"),
        allowed,
        f"--partition {nearest(request.partitions[0], partitions)}",
    )


def _other_partition(request: ResourceRequest, tried: set[str], facts: SlurmFacts) -> str:
    """A partition that could start the job."""
    for name, partition in (facts.partitions or {}).items():
        elsewhere = replace(request, spec=replace(request.spec, partition=name))
        if name not in tried and partition.state == "UP" and not _check_partition(elsewhere, partition, facts):
            return name
    return ""


def _check_partition(request: ResourceRequest, partition: Partition, facts: SlurmFacts) -> list[Problem]:
    nodes = [] if facts.can_grow else _check_nodes(request, partition, facts)
    if facts.rewrites_jobs:
        return nodes  # certain only if no node of the cluster can provide it
    state = []
    if partition.state in ("INACTIVE", "DRAIN"):
        what = "the partition takes no jobs now"
        open_ones = [name for name, other in (facts.partitions or {}).items() if other.state == "UP"]
        state = [Problem("partition", what, f"{partition.name}: {partition.state}", some_names(open_ones))]
    return [*state, *_check_time(request, partition, facts), *nodes, *check_rights(request, partition, facts)]


# --- How much ---------------------------------------------------------------------------------------------------------


def _check_time(request: ResourceRequest, partition: Partition, facts: SlurmFacts) -> list[Problem]:
    asked_s, most_s = request.time_s, partition.max_time_s
    if "time-min" in request.options:  # Slurm may shorten it
        return []
    if asked_s is None:
        default_s, notice_s = partition.default_time_s, request.spec.signal_notice_s
        has_notice = bool(request.spec.resume) and notice_s > 0 and not request.spec.time
        if not has_notice or default_s is None or default_s > notice_s:
            return []
        return [
            Problem(
                "time",
                "the warning signal would come before the job starts",
                f"no --time: the limit of partition {partition.name} is {slurm_time(default_s)}",
                f"a limit above {notice_s} s",
                f"--time {slurm_time(min(most_s or 3600, 3600))}",
            )
        ]
    if most_s is None or asked_s <= most_s or may_exceed(request, facts, "partitiontimelimit"):
        return []
    return [
        Problem(
            "time",
            "the time limit is longer than the partition allows",
            request.named("time"),
            f"up to {slurm_time(most_s)} in partition {partition.name}",
            f"--time {slurm_time(most_s)}: a job that reaches its limit saves and continues after a requeue",
        )
    ]


def _check_nodes(request: ResourceRequest, partition: Partition, facts: SlurmFacts) -> list[Problem]:
    asked, where = request.spec.nodes, f"partition {partition.name}"
    got = request.named("nodes")
    if not facts.rewrites_jobs:
        most = partition.max_nodes
        if most is not None and asked > most and not may_exceed(request, facts, "partitionmaxnodes"):
            allowed = f"up to {most} for a job in {where}"
            return [Problem("nodes", "a job may not have this many nodes", got, allowed, f"--nodes {most}")]
        least = partition.min_nodes
        if asked < least and not may_exceed(request, facts, "partitionminnodes"):
            allowed = f"{least} or more for a job in {where}"
            return [Problem("nodes", "a job must have more nodes", got, allowed, f"--nodes {least}")]
    if not partition.kinds:
        return []
    missing = [
        *_check_gres(request, partition),
        *_check_cpus(request, partition),
        *_check_memory(request, partition),
        *_check_constraint(request, partition),
    ]
    if missing:
        return missing
    total, fitting = sum(kind.count for kind in partition.kinds), _count_fitting(request, partition)
    if asked <= fitting:
        return []
    if fitting == total:
        return [Problem("nodes", "there are not enough nodes", got, f"1 to {total} in {where}", f"--nodes {total}")]
    allowed = f"{fitting} of the {total} nodes of {where} have what a node of this job needs"
    hint = f"--nodes {fitting}, or request less per node" if fitting else "request less per node"
    return [Problem("nodes", "there are not enough nodes of this kind", got, allowed, hint)]


def _count_fitting(request: ResourceRequest, partition: Partition) -> int:
    one_each = (
        kind.count
        for kind in partition.kinds
        if not any(
            check(request, replace(partition, kinds=(kind,)))
            for check in (_check_cpus, _check_gres, _check_memory, _check_constraint)
        )
    )
    return sum(one_each)


def _check_cpus(request: ResourceRequest, partition: Partition) -> list[Problem]:
    most = max(kind.cpus for kind in partition.kinds)
    if partition.max_cpus_per_node is not None:
        most = min(most, partition.max_cpus_per_node)
    needed, spec = request.cpus_per_node, request.spec
    if needed <= most or not request.has_known_cpus:
        return []
    tasks = f"{spec.tasks_per_node} tasks x " if spec.tasks_per_node > 1 else ""
    share = most // spec.tasks_per_node
    least = 1 if spec.start == "ranks" else spec.ranks_per_node  # CPUs of a task
    hint = f"--cpus-per-task {share}" if share >= least else f"fewer ranks on a node: at most {most}, with one CPU each"
    return [
        Problem(
            "cpus_per_task",
            "no node has this many CPUs",
            f"{needed} CPUs on a node ({tasks}--cpus-per-task {spec.cpus_per_task})",
            f"up to {most} on a node of partition {partition.name}",
            hint,
        )
    ]


def _check_gres(request: ResourceRequest, partition: Partition) -> list[Problem]:
    problems = []
    for item in request.gres:
        most = max(kind.gres_count(item.name, item.kind) for kind in partition.kinds)
        if item.count <= most:
            continue
        is_gpu, typed = item.name == "gpu", bool(item.kind)
        named = f"{item.kind}:" if typed else ""
        setting = "gpus_per_node" if is_gpu and not request.spec.gres else "gres"
        flag = "--gpus-per-node" if setting == "gpus_per_node" else "--gres"
        prefix = "" if setting == "gpus_per_node" else f"{item.name}:"
        there = describe_gres(partition.kinds, item.name)
        hint = f"{flag} {prefix}{named}{most}" if most else _other_gres(partition, item, flag, prefix)
        what = "no node has this many GPUs" if is_gpu else f"no node has this many of {item.name}"
        if typed and not most:
            what = f"no node has {item.name} of type {item.kind}"
        allowed = f"{there} on a node of partition {partition.name}"
        problems.append(Problem(setting, what, f"{flag} {prefix}{named}{item.count}", allowed, hint))
    return problems


def _other_gres(partition: Partition, item: Gres, flag: str, prefix: str) -> str:
    """Suggest a type that exists on a node."""
    there = [other for kind in partition.kinds for other in kind.gres if other.name == item.name]
    best = max(there, key=lambda other: other.count, default=None)
    if best is None:
        return "--processes-per-node N, to train on CPUs" if item.name == "gpu" else f"leave {flag} out"
    named = f"{best.kind}:" if best.kind else ""
    return f"{flag} {prefix}{named}{min(item.count, best.count)}"


def describe_gres(kinds: Iterable[NodeKind], name: str) -> str:
    texts = {
        " and ".join(str(item).removeprefix(f"{name}:") for item in kind.gres if item.name == name) for kind in kinds
    }
    found = sorted(text for text in texts if text)
    return f"{name} {' or '.join(found)}" if found else f"no {name}"


def _check_memory(request: ResourceRequest, partition: Partition) -> list[Problem]:
    if not re.fullmatch(r"[0-9]{1,18}[KMGT]?", request.spec.mem, re.IGNORECASE):
        return []
    needed_mb, most_mb = read_memory_mb(request.spec.mem), max(kind.memory_mb for kind in partition.kinds)
    if needed_mb <= most_mb:  # 0: all of a node's memory
        return []
    allowed = f"up to {most_mb}M on a node of partition {partition.name}"
    return [Problem("mem", "no node has this much memory", request.named("mem"), allowed, f"--mem {most_mb}M")]


def _check_constraint(request: ResourceRequest, partition: Partition) -> list[Problem]:
    """Check only a single feature. Slurm checks expressions of several features."""
    wanted = request.spec.constraint
    if not re.fullmatch(r"[\w.-]+", wanted):
        return []
    features = {name for kind in partition.kinds for name in kind.features}
    if wanted.lower() in features:
        return []
    allowed = some_names(sorted(features)) if features else f"the nodes of partition {partition.name} have no features"
    hint = f"--constraint {nearest(wanted, features)}" if features else "leave --constraint out"
    return [Problem("constraint", "no node has this feature", request.named("constraint"), allowed, hint)]


def _check_array(request: ResourceRequest, facts: SlurmFacts) -> list[Problem]:
    numbers = [read_number(number) for number in re.findall(r"(?<![%:\d])\d+", request.spec.array)]
    most = facts.max_array_size
    if most is None or all(number is None or number < most for number in numbers):
        return []
    allowed = f"numbers from 0 to {most - 1}"
    hint = f"several submissions of at most {most} tasks"
    return [Problem("array", "the array is too large", request.named("array"), allowed, hint)]


def _join(first: str, second: str) -> str:
    return f"{first}\nor {second}" if first else second
