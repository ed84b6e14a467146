"""What a Slurm cluster offers: its partitions, nodes, accounts and QOS, as its own clients report them.

A question that gets no answer in time leaves its part of the facts empty. Nothing here raises.
"""

from __future__ import annotations

import getpass
import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from paceline.errors import UserError
from paceline.launch.job import parse_time_s

ASK_TIMEOUT_S = 3.0
# These plugins only judge a job. Any other one may change its partition, account or QOS after it is submitted.
_JUDGING_PLUGINS = frozenset({"require_timelimit", "throttle"})
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
    """Nodes of one partition that are alike."""

    count: int
    cpus: int
    memory_mb: int
    gres: tuple[Gres, ...] = ()
    features: frozenset[str] = frozenset()

    def gres_count(self, name: str, kind: str = "") -> int:
        return sum(
            item.count for item in self.gres if item.name == name and (not kind or item.kind.lower() == kind.lower())
        )


@dataclass(frozen=True)
class Limits:
    """Of one job. None: no limit."""

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
    qos: str = ""  # whose limits come first for jobs of this partition
    kinds: tuple[NodeKind, ...] = ()  # empty: not known


@dataclass(frozen=True)
class Qos:
    name: str
    flags: frozenset[str] = frozenset()
    limits: Limits = Limits()


@dataclass(frozen=True)
class Association:
    """An account of this user, and what it may use."""

    account: str
    partition: str = ""  # empty: every one
    qos: frozenset[str] = frozenset()
    default_qos: str = ""
    limits: Limits = Limits()


@dataclass(frozen=True)
class SlurmFacts:
    """None: could not be asked, so nothing may be concluded from it."""

    version: tuple[int, int] = (0, 0)
    partitions: Mapping[str, Partition] | None = None
    rewrites_jobs: bool = False  # a plugin of the site may change what a job asks for
    is_federated: bool = False
    can_grow: bool = False  # nodes may register that are not listed now
    max_array_size: int | None = None
    enforces: frozenset[str] = frozenset()  # associations, limits, qos
    has_accounting: bool = False
    user: str = ""
    default_account: str = ""
    associations: tuple[Association, ...] | None = None
    qos: Mapping[str, Qos] | None = None


def ask_slurm() -> SlurmFacts:
    """All questions at once, since each takes a connection to the controller or to the database."""
    user = _user()
    questions = {
        "config": ["scontrol", "show", "config"],
        "partitions": ["scontrol", "--all", "--oneliner", "show", "partition"],
        # --exact: nodes that differ get lines of their own, instead of one line with "4+".
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
        answers = dict(zip(questions, threads.map(_ask, questions.values()), strict=True))
    return read_facts(answers, user)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name
        return ""


def _ask(command: list[str]) -> str | None:
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
    """The clients' answers, by the names that `ask_slurm` gives them. Pure."""
    config = dict(re.findall(r"^(\w+)\s*= (.*?)\s*$", answers.get("config") or "", re.MULTILINE))
    if not config:
        return SlurmFacts(user=user)
    version = re.match(r"(\d+)\.(\d+)", config.get("SLURM_VERSION", ""))
    has_accounting = config.get("AccountingStorageType", "").endswith("/slurmdbd")
    kinds = _read_kinds(answers.get("nodes"))
    return SlurmFacts(
        version=(int(version[1]), int(version[2])) if version else (0, 0),
        partitions=_read_partitions(answers.get("partitions"), kinds, config),
        rewrites_jobs=_rewrites_jobs(config),
        is_federated=bool((answers.get("federation") or "").strip()),
        can_grow=_can_grow(config, answers.get("node_count")),
        max_array_size=_number(config.get("MaxArraySize", "")),
        enforces=frozenset(_words(config.get("AccountingStorageEnforce", "")) or ()),
        has_accounting=has_accounting,
        user=user,
        default_account=(answers.get("user") or "").strip().lower() if has_accounting else "",
        associations=_read_associations(answers.get("associations"), config) if has_accounting and user else None,
        qos=_read_qos(answers.get("qos")) if has_accounting else None,
    )


# --- One answer -------------------------------------------------------------------------------------------------------


def _read_partitions(
    text: str | None, kinds: Mapping[str, tuple[NodeKind, ...]], config: Mapping[str, str]
) -> dict[str, Partition] | None:
    hidden = _words(config.get("PrivateData", "")) or frozenset()
    if not text or "partitions" in hidden:
        return None
    if "nodes" in hidden:
        kinds = {}
    found = {}
    for line in text.splitlines():
        values = dict(re.findall(r"(\w+)=(\S*)", line))
        if name := values.get("PartitionName"):
            found[name] = Partition(
                name,
                is_default=values.get("Default") == "YES",
                state=values.get("State", "UP"),
                max_time_s=_seconds(values.get("MaxTime", "")),
                default_time_s=_seconds(values.get("DefaultTime", "")),
                min_nodes=_number(values.get("MinNodes", "")) or 0,
                max_nodes=_number(values.get("MaxNodes", "")),
                max_cpus_per_node=_number(values.get("MaxCPUsPerNode", "")),
                allowed_accounts=_words(values.get("AllowAccounts", "")),
                denied_accounts=_words(values.get("DenyAccounts", "")) or frozenset(),
                allowed_qos=_words(values.get("AllowQos", "")),
                denied_qos=_words(values.get("DenyQos", "")) or frozenset(),
                qos="" if values.get("QoS", "N/A") == "N/A" else values["QoS"].lower(),
                kinds=kinds.get(name, ()),
            )
    return found or None


def _read_kinds(text: str | None) -> dict[str, tuple[NodeKind, ...]]:
    found: dict[str, list[NodeKind]] = {}
    for line in (text or "").splitlines():
        parts = line.split("|", maxsplit=5)
        numbers = [_number(part) for part in parts[1:4]]
        if len(parts) == 6 and numbers[0] and numbers[1] is not None and numbers[2] is not None:
            kind = NodeKind(numbers[0], numbers[1], numbers[2], read_gres(parts[4]), _words(parts[5]) or frozenset())
            found.setdefault(parts[0], []).append(kind)
        elif parts[0]:
            found[parts[0]] = []  # a line that is not understood: the nodes of this partition are not known
    return {name: tuple(kinds) for name, kinds in found.items()}


def read_gres(text: str) -> tuple[Gres, ...]:
    """`gpu:a100:4(S:0,1),shard:8`: of a node or of a request. What is not understood is left out."""
    found = []
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        words = [word for word in item.strip().replace("=", ":").split(":") if word != "no_consume"]
        name = words[0].removeprefix("gres/")
        if not name:
            continue
        count = re.fullmatch(r"(\d+)([KMGT]?)", words[-1], re.IGNORECASE) if len(words) > 1 else None
        size = int(count[1]) * 1024 ** " KMGT".index(count[2].upper() or " ") if count else 1
        kinds = words[1:-1] if count else words[1:]
        found.append(Gres(name, ":".join(kinds), size))
    return tuple(found)


def _read_associations(text: str | None, config: Mapping[str, str]) -> tuple[Association, ...] | None:
    if text is None:
        return None
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 6]
    return tuple(
        Association(account.lower(), partition, _words(qos) or frozenset(), default_qos.lower(), _limits(wall, tres))
        for cluster, account, partition, qos, default_qos, wall, tres in rows
        if cluster == config.get("ClusterName", cluster)
    )


def _read_qos(text: str | None) -> dict[str, Qos] | None:
    rows = [line.split("|") for line in (text or "").splitlines() if line.count("|") == 3]
    found = {
        name.lower(): Qos(name.lower(), _words(flags) or frozenset(), _limits(wall, tres))
        for name, flags, wall, tres in rows
    }
    return found or None


def _limits(wall: str, tres: str) -> Limits:
    counts = {name: _number(value) for name, _, value in (item.partition("=") for item in tres.split(","))}
    return Limits(_seconds(wall), counts.get("node"), counts.get("cpu"), counts.get("gres/gpu"))


def _rewrites_jobs(config: Mapping[str, str]) -> bool:
    plugins = (_words(config.get(name, "")) or () for name in ("JobSubmitPlugins", "CliFilterPlugins"))
    return any(name.rpartition("/")[2] not in _JUDGING_PLUGINS for group in plugins for name in group)


def _can_grow(config: Mapping[str, str], node_count: str | None) -> bool:
    """Dynamic nodes: more may register than are listed now."""
    most, now = _number(config.get("MaxNodeCount", "")), [_number(line) for line in (node_count or "").split()]
    return most is not None and None not in now and most > sum(count or 0 for count in now)


def _seconds(text: str) -> int | None:
    try:
        return parse_time_s(text)
    except UserError:  # UNLIMITED, NONE, empty
        return None


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None


def _words(text: str) -> frozenset[str] | None:
    """A list of names, None for all or for no list."""
    if text.strip().lower() in ("", "all", "(null)", "none", "n/a"):
        return None
    return frozenset(word.strip().lower() for word in text.split(",") if word.strip())


def read_memory_mb(text: str) -> float:
    """As sbatch reads --mem: without a unit, megabytes."""
    unit = text[-1:].upper()
    return int(text[:-1]) * _MEMORY_UNITS_MB[unit] if unit in _MEMORY_UNITS_MB else int(text)
