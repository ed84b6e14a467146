"""Check the permissions and limits of a job: account, QOS and partition. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.integrations.slurm.facts import Association, Limits, Partition, Qos, SlurmFacts
from paceline.integrations.slurm.request import Problem, ResourceRequest, nearest, slurm_time, some_names

# From this version on, a partition's list of accounts may include child accounts, which are not queried here.
_LISTS_MAY_HOLD_SUBACCOUNTS = (24, 5)


def may_exceed(request: ResourceRequest, facts: SlurmFacts, flag: str) -> bool:
    """Whether the job's QOS may lift a limit of the partition."""
    if not facts.has_accounting:
        return False
    if facts.qos is None:
        return True  # not known
    names = _possible_qos(request, facts)
    possible = facts.qos.values() if names is None else [facts.qos[name] for name in names if name in facts.qos]
    return any(flag in qos.flags for qos in possible)


def check_rights(request: ResourceRequest, partition: Partition | None, facts: SlurmFacts) -> list[Problem]:
    return [
        *_check_account(request, partition, facts),
        *_check_qos(request, partition, facts),
        *_check_limits(request, partition, facts),
    ]


def _may_hold_subaccounts(facts: SlurmFacts) -> bool:
    return facts.version is None or facts.version >= _LISTS_MAY_HOLD_SUBACCOUNTS


def _account(request: ResourceRequest, facts: SlurmFacts) -> str:
    return request.spec.account.lower() or facts.default_account


def _usable(request: ResourceRequest, partition: Partition | None, facts: SlurmFacts) -> list[Association]:
    """Associations that the job may use. If the account is unknown, any of the user's."""
    account = _account(request, facts)
    return [
        found
        for found in facts.associations or ()
        if (not account or found.account == account)
        and (not found.partition or partition is None or found.partition == partition.name)
    ]


def _possible_qos(request: ResourceRequest, facts: SlurmFacts) -> set[str] | None:
    """The names of the QOS that the job may use. None: any."""
    if request.spec.qos:
        return {request.spec.qos.lower()}
    usable = _usable(request, None, facts)
    names = {name for found in usable for name in ({found.default_qos} if found.default_qos else found.qos)}
    return names if usable and all(found.default_qos or found.qos for found in usable) else None


# --- Account and QOS --------------------------------------------------------------------------------------------------


def _check_account(request: ResourceRequest, partition: Partition | None, facts: SlurmFacts) -> list[Problem]:
    asked = request.spec.account.lower()
    if "associations" in facts.enforces and facts.associations is not None:
        mine = sorted({found.account for found in facts.associations})
        if not mine:
            got = f"user {facts.user} has no account"
            hint = "ask the site's support"
            return [Problem("account", "the cluster needs an account", got, "jobs with an account", hint)]
        if asked and asked not in mine:
            hint = f"--account {nearest(asked, mine)}"
            got = request.named("account")
            return [Problem("account", "this account is not one of yours", got, some_names(mine), hint)]
        if partition is not None and not _usable(request, partition, facts):
            bound = sorted({found.partition for found in _usable(request, None, facts)})
            got = f"account {_account(request, facts) or 'not given'} in partition {partition.name}"
            what = "the account may not use this partition"
            return [Problem("partition", what, got, some_names(bound), f"--partition {bound[0]}" if bound else "")]
    account = _account(request, facts)
    if partition is None or not account:
        return []
    allowed = partition.allowed_accounts
    is_outside = allowed is not None and account not in allowed and not _may_hold_subaccounts(facts)
    if account in partition.denied_accounts or is_outside:
        allowed_text = (
            some_names(sorted(allowed)) if allowed else f"all but {some_names(sorted(partition.denied_accounts))}"
        )
        got = f"account {account} in partition {partition.name}"
        hint = "another --account, or another --partition"
        return [Problem("account", "the partition does not allow this account", got, allowed_text, hint)]
    return []


def _check_qos(request: ResourceRequest, partition: Partition | None, facts: SlurmFacts) -> list[Problem]:
    asked = request.spec.qos.lower()
    if not asked or not facts.has_accounting:
        return []
    got = request.named("qos")
    if facts.qos is not None and asked not in facts.qos:
        hint = f"--qos {nearest(asked, facts.qos)}"
        return [Problem("qos", "there is no such QOS", got, some_names(facts.qos), hint)]
    if "qos" not in facts.enforces:
        return []
    usable = _usable(request, partition, facts)
    mine = sorted({name for found in usable for name in found.qos})
    # A list that extends the parent's, such as +long, is not resolved here.
    if usable and mine and asked not in mine and not any(name[0] in "+-" for name in mine):
        what = "this QOS is not one of yours"
        return [Problem("qos", what, got, some_names(mine), f"--qos {nearest(asked, mine)}")]
    if partition is None:
        return []
    allowed = partition.allowed_qos
    if asked in partition.denied_qos or (allowed is not None and asked not in allowed):
        allowed_text = some_names(sorted(allowed)) if allowed else f"all but {some_names(sorted(partition.denied_qos))}"
        hint = "another --qos, or another --partition"
        what = f"partition {partition.name} does not allow this QOS"
        return [Problem("qos", what, got, allowed_text, hint)]
    return []


# --- Limits of one job ------------------------------------------------------------------------------------------------


def _check_limits(request: ResourceRequest, partition: Partition | None, facts: SlurmFacts) -> list[Problem]:
    """Check the limits of the account and the QOS. A job above them waits forever."""
    if not facts.enforces & {"limits", "safe"} or facts.associations is None or facts.qos is None:
        return []
    choices = _possible_limits(request, partition, facts, facts.qos)
    spec = request.spec
    gpus = sum(item.count for item in request.gres if item.name == "gpu")
    time_s = None if "time-min" in request.options else request.time_s
    cpus = spec.nodes * request.cpus_per_node if request.has_known_cpus else None
    asked = [
        ("time", "this much time", time_s, [limits.time_s for limits in choices]),
        ("nodes", "this many nodes", spec.nodes, [limits.nodes for limits in choices]),
        ("cpus_per_task", "this many CPUs", cpus, [limits.cpus for limits in choices]),
        ("gpus_per_node", "this many GPUs", spec.nodes * gpus, [limits.gpus for limits in choices]),
    ]
    problems = []
    for setting, resource, value, limits in asked:
        known = [limit for limit in limits if limit is not None]
        if value is None or not known or len(known) < len(limits) or value <= max(known):
            continue
        most = max(known)
        got, allowed = (slurm_time(value), slurm_time(most)) if setting == "time" else (str(value), str(most))
        what = f"the account or QOS does not allow {resource} for one job"
        hint = f"--time {allowed}" if setting == "time" else "request less, or use another --qos"
        if setting == "nodes":
            hint = f"--nodes {most}"
        problems.append(Problem(setting, what, f"{got} in all", f"up to {allowed}", hint))
    return problems


def _possible_limits(
    request: ResourceRequest, partition: Partition | None, facts: SlurmFacts, known: Mapping[str, Qos]
) -> list[Limits]:
    """One entry for each account and QOS that the job may use. A QOS limit replaces the account's limit."""
    names = _possible_qos(request, facts)
    whole = known.get(partition.qos) if partition is not None else None
    choices = []
    for found in _usable(request, partition, facts):
        possible = sorted(names if names is not None else found.qos)
        if not possible or any(name not in known for name in possible):  # the QOS is unknown
            possible = [*known, ""]
        for name in possible:
            own = known.get(name, Qos(name))
            choices.append(_merge(found.limits, own.limits, whole.limits if whole else Limits()))
    return choices


def _merge(account: Limits, own: Limits, whole: Limits) -> Limits:
    """Flags decide whether the partition's QOS or the job's QOS applies. Use the larger limit."""

    def one(name: str) -> int | None:
        limits = [value for value in (getattr(own, name), getattr(whole, name)) if value is not None]
        value: int | None = max(limits) if limits else getattr(account, name)
        return value

    return Limits(one("time_s"), one("nodes"), one("cpus"), one("gpus"))
