"""What a Slurm cluster offers: its partitions, nodes, accounts and QOS, as its own clients report them.

If a query gets no answer in time, its part of the facts is unknown. The same holds for an answer that is incomplete or
cannot be parsed: unknown is never treated as "none". Nothing here raises.
"""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paceline.errors import UserError
from paceline.launch.job import parse_time_s

ASK_TIMEOUT_S = 3.0
# These plugins only check a job. Any other plugin may change its partition, account or QOS.
_JUDGING_PLUGINS = frozenset({"require_timelimit", "throttle"})
_MOST_DIGITS = 18  # Slurm uses 64-bit numbers
_MEMORY_UNITS_MB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True)
class Gres:
    """A generic resource: `gpu:a100:4` is four of type a100."""

    name: str
    kind: str = ""
    count: int = 1

    def __str__(self) -> str:
        return ":".join(part for part in (self.name, self.kind, str(self.count)) if part)


@dataclass(frozen=True)
class NodeKind:
    """Identical nodes of one partition."""

    count: int
    cpus: int
    memory_mb: int
    gres: tuple[Gres, ...] = ()
    features: frozenset[str] = frozenset()

    def gres_count(self, name: str, kind: str = "") -> int:
        return sum(
            item.count for item in self.gres if item.name == name and (not kind or item.kind.lower() == kind.lower())
        )


NOT_KNOWN = sys.maxsize


@dataclass(frozen=True)
class Limits:
    """Limits of one job. None: no limit. A limit that cannot be parsed is NOT_KNOWN, which no job exceeds."""

    time_s: int | None = None
    nodes: int | None = None
    cpus: int | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class Partition:
    name: str
    is_default: bool = False
    state: str = "UP"
    max_time_s: int | None = None
    default_time_s: int | None = None
    min_nodes: int = 0
    max_nodes: int | None = None
    max_cpus_per_node: int | None = None
    allowed_accounts: frozenset[str] | None = None  # None: all
    denied_accounts: frozenset[str] = frozenset()
    allowed_qos: frozenset[str] | None = None
    denied_qos: frozenset[str] = frozenset()
    qos: str = ""  # its limits take precedence for jobs of this partition
    kinds: tuple[NodeKind, ...] = ()  # empty: not known


@dataclass(frozen=True)
class Qos:
    name: str
    flags: frozenset[str] = frozenset()
    limits: Limits = Limits()


@dataclass(frozen=True)
class Association:
    """An account of this user, and its permissions."""

    account: str
    partition: str = ""  # empty: all partitions
    qos: frozenset[str] = frozenset()
    default_qos: str = ""
    limits: Limits = Limits()


@dataclass(frozen=True)
class SlurmFacts:
    """What is known about the cluster. None: unknown."""

    version: tuple[int, int] | None = None
    partitions: Mapping[str, Partition] | None = None
    rewrites_jobs: bool = False  # a plugin of the site may change a job's request
    is_federated: bool = False  # also true if unknown
    can_grow: bool = False  # more nodes may register later
    max_array_size: int | None = None
    enforces: frozenset[str] = frozenset()  # associations, limits, qos
    has_accounting: bool = False
    user: str = ""
    default_account: str = ""  # empty: not known
    associations: tuple[Association, ...] | None = None
    qos: Mapping[str, Qos] | None = None


def ask_slurm() -> SlurmFacts:
    """Send all queries in parallel: each needs a connection to the controller or the database."""
    user = _user()
    questions = {
        "config": ["scontrol", "show", "config"],
        "partitions": ["scontrol", "--all", "--oneliner", "show", "partition"],
        # --exact: different nodes get separate lines, instead of one line with "4+".
        "nodes": ["sinfo", "--all", "--noheader", "--exact", "--format=%R|%D|%c|%m|%G|%f"],
        "node_count": ["sinfo", "--all", "--noheader", "--format=%D"],
        "federation": ["scontrol", "show", "federation"],
        "associations": [
            *("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={user}"),
            "format=cluster,account,partition,qos,defaultqos,maxwall,maxtresperjob",
        ],
        "qos": [
            *("sacctmgr", "--noheader", "--parsable2", "show", "qos"),
            "format=name,flags,maxwall,maxtresperjob",
        ],
        "user": ["sacctmgr", "--noheader", "--parsable2", "show", "user", user, "format=defaultaccount"],
    }
    with ThreadPoolExecutor(len(questions)) as threads:
        answers = dict(zip(questions, threads.map(_query, questions.values()), strict=True))
    return read_facts(answers, user)


def _user() -> str:
    """Slurm uses the user id. LOGNAME and USER may have any value."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # the user id has no name
        return ""


def _query(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def read_facts(answers: Mapping[str, str | None], user: str = "") -> SlurmFacts:
    """Parse the clients' answers, with the names used in `ask_slurm`. Pure."""
    config = dict(re.findall(r"^(\w+)\s*= (.*?)\s*$", answers.get("config") or "", re.MULTILINE))
    if not config:
        return SlurmFacts(user=user)
    version = re.match(r"(\d{1,4})\.(\d{1,4})\b", config.get("SLURM_VERSION", ""))
    has_accounting = config.get("AccountingStorageType", "").endswith("/slurmdbd")
    rows = _read_rows(answers.get("associations"), 7) if has_accounting and user else None
    kinds = _read_kinds(answers.get("nodes"))
    return SlurmFacts(
        version=(int(version[1]), int(version[2])) if version else None,
        partitions=_read_partitions(answers.get("partitions"), kinds, config),
        rewrites_jobs=_rewrites_jobs(config),
        is_federated=_may_be_federated(answers.get("federation"), has_accounting),
        can_grow=_can_grow(config, answers.get("node_count")),
        max_array_size=read_number(config.get("MaxArraySize", "")),
        enforces=frozenset(_names(config.get("AccountingStorageEnforce", "")) or ()),
        has_accounting=has_accounting,
        user=user,
        default_account=_read_default_account(answers.get("user"), rows, config),
        associations=_read_associations(rows, config),
        qos=_read_qos(answers.get("qos")) if has_accounting else None,
    )


# --- One answer -------------------------------------------------------------------------------------------------------


def _read_partitions(
    text: str | None, kinds: Mapping[str, tuple[NodeKind, ...]], config: Mapping[str, str]
) -> dict[str, Partition] | None:
    """None if unknown, also if a part of the answer cannot be parsed."""
    hidden = _names(config.get("PrivateData", "")) or frozenset()
    if not text or "partitions" in hidden:
        return None
    if "nodes" in hidden:
        kinds = {}
    found = {}
    for line in text.splitlines():
        values = dict(re.findall(r"(\w+)=(\S*)", line))
        if name := values.get("PartitionName"):
            total = values.get("TotalNodes", "")
            found[name] = Partition(
                name,
                is_default=values.get("Default") == "YES",
                state=values.get("State", "UP"),
                max_time_s=_seconds(values.get("MaxTime", "")),
                default_time_s=_seconds(values.get("DefaultTime", "")),
                min_nodes=read_number(values.get("MinNodes", "")) or 0,
                max_nodes=read_number(values.get("MaxNodes", "")),
                max_cpus_per_node=read_number(values.get("MaxCPUsPerNode", "")),
                allowed_accounts=_names(values.get("AllowAccounts", "")),
                denied_accounts=_names(values.get("DenyAccounts", "")) or frozenset(),
                allowed_qos=_names(values.get("AllowQos", "")),
                denied_qos=_names(values.get("DenyQos", "")) or frozenset(),
                qos="" if values.get("QoS", "N/A") == "N/A" else values["QoS"].lower(),
                kinds=_all_or_none(kinds.get(name, ()), total, config),
            )
        elif line.strip():
            return None
    return found or None


def _all_or_none(kinds: tuple[NodeKind, ...], total: str, config: Mapping[str, str]) -> tuple[NodeKind, ...]:
    """An elastic cluster does not list nodes that are powered down, so the list may be incomplete."""
    is_elastic = config.get("ResumeProgram", "(null)") not in ("", "(null)")
    if not total and not is_elastic:
        return kinds
    return kinds if sum(kind.count for kind in kinds) == read_number(total) else ()


def _read_kinds(text: str | None) -> dict[str, tuple[NodeKind, ...]]:
    """The node kinds of each partition. Partitions with a line that cannot be parsed are left out."""
    found: dict[str, list[NodeKind]] = {}
    not_understood: set[str] = set()
    for line in (text or "").splitlines():
        parts = line.split("|", maxsplit=5)
        if line.strip() and len(parts) < 2:
            return {}  # a notice, which may replace any line
        kind = _read_kind(parts)
        if kind is None:
            not_understood.add(parts[0])
        else:
            found.setdefault(parts[0], []).append(kind)
    return {name: tuple(kinds) for name, kinds in found.items() if name not in not_understood}


def _read_kind(parts: list[str]) -> NodeKind | None:
    if len(parts) != 6:
        return None
    count, cpus, memory_mb = (read_number(part) for part in parts[1:4])
    gres, features = read_gres(parts[4]), parts[5].strip()
    if not count or cpus is None or memory_mb is None or gres is None:
        return None
    # `all` and `none` are ordinary names here.
    names = [] if features == "(null)" else [name.strip().lower() for name in features.split(",")]
    return NodeKind(count, cpus, memory_mb, gres, frozenset(name for name in names if name))


def read_gres(text: str) -> tuple[Gres, ...] | None:
    """Parse `gpu:a100:4(S:0,1),shard:8` of a node or a request. None if it cannot be parsed."""
    found: list[Gres] = []
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        if not item.strip() or item.strip().lower() == "none":
            continue
        words = [word for word in item.strip().replace("=", ":").split(":") if word != "no_consume"]
        name = words[0].removeprefix("gres/") if words else ""
        if not all(re.fullmatch(r"[\w.-]+", word) for word in (name, *words[1:])):
            return None
        count = re.fullmatch(r"([0-9]+)([KMGTP]?)", words[-1], re.IGNORECASE) if len(words) > 1 else None
        number = read_number(count[1]) if count else 1
        if number is None:
            return None
        size = number * 1024 ** " KMGTP".index(count[2].upper() or " ") if count else 1
        kinds = words[1:-1] if count else words[1:]
        found.append(Gres(name, ":".join(kinds), size))
    return tuple(found)


def _read_rows(text: str | None, columns: int) -> list[list[str]] | None:
    """Parse a table of sacctmgr. None if unknown, also if a line is not a row."""
    if text is None:
        return None
    rows = [line.split("|") for line in text.splitlines() if line.strip()]
    return rows if all(len(row) == columns for row in rows) else None


def _read_default_account(text: str | None, rows: list[list[str]] | None, config: Mapping[str, str]) -> str:
    """A user of several clusters has one on each, and the answer does not name the cluster."""
    names = (text or "").lower().split()
    if rows is None or len(names) != 1:
        return ""
    accounts = {row[1].lower() for row in rows}
    is_of_this_cluster = all(row[0] == config.get("ClusterName") for row in rows)
    return names[0] if is_of_this_cluster and names[0] in accounts else ""


def _read_associations(rows: list[list[str]] | None, config: Mapping[str, str]) -> tuple[Association, ...] | None:
    if rows is None:
        return None
    return tuple(
        Association(account.lower(), partition, _names(qos) or frozenset(), default_qos.lower(), _limits(wall, tres))
        for cluster, account, partition, qos, default_qos, wall, tres in rows
        if cluster == config.get("ClusterName", cluster)
    )


def _read_qos(text: str | None) -> dict[str, Qos] | None:
    rows = _read_rows(text, 4)
    found = {
        name.lower(): Qos(name.lower(), _names(flags) or frozenset(), _limits(wall, tres))
        for name, flags, wall, tres in rows or ()
    }
    return found or None


def _limits(wall: str, tres: str) -> Limits:
    counts = {}
    for name, _, value in (item.partition("=") for item in tres.split(",")):
        number = read_number(value)
        counts[name] = NOT_KNOWN if number is None else number
    time_s = (_seconds(wall) or NOT_KNOWN) if wall.strip() else None
    return Limits(time_s, counts.get("node"), counts.get("cpu"), counts.get("gres/gpu"))


def _rewrites_jobs(config: Mapping[str, str]) -> bool:
    plugins = (_names(config.get(name, "")) or () for name in ("JobSubmitPlugins", "CliFilterPlugins"))
    return any(name.rpartition("/")[2] not in _JUDGING_PLUGINS for group in plugins for name in group)


def _can_grow(config: Mapping[str, str], node_count: str | None) -> bool:
    """Dynamic nodes: more nodes may register than are listed now. True also if unknown."""
    if "MaxNodeCount" not in config:
        return False
    most, now = read_number(config["MaxNodeCount"]), [read_number(line) for line in (node_count or "").split()]
    return most is None or None in now or most > sum(count or 0 for count in now)


def _may_be_federated(answer: str | None, has_accounting: bool) -> bool:
    """A federation needs the accounting database."""
    return has_accounting if answer is None else bool(answer.strip())


def _seconds(text: str) -> int | None:
    try:
        return parse_time_s(text)
    except UserError:  # UNLIMITED, NONE, empty
        return None


def read_number(text: str) -> int | None:
    """None if it is not a number, or too large for Slurm."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _names(text: str) -> frozenset[str] | None:
    """A list of names; None for all, or if there is no list."""
    if text.strip().lower() in ("", "all", "(null)", "none", "n/a"):
        return None
    return frozenset(word.strip().lower() for word in text.split(",") if word.strip())


def read_memory_mb(text: str) -> float:
    """Parse --mem like sbatch: the default unit is megabytes."""
    unit = text[-1:].upper()
    return int(text[:-1]) * _MEMORY_UNITS_MB[unit] if unit in _MEMORY_UNITS_MB else int(text)
