"""The resources that a job requests, as sbatch reads them, and the problems of a request."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import UserError
from paceline.integrations.slurm.facts import Gres, read_gres, read_number
from paceline.launch.job import JobSpec, parse_time_s

# Settings that an environment variable may also set: SBATCH_PARTITION for sbatch, SLURM_PARTITION for srun.
_VARIABLES = {
    **{"partition": "PARTITION", "account": "ACCOUNT", "qos": "QOS"},
    **{"time": "TIMELIMIT", "constraint": "CONSTRAINT", "reservation": "RESERVATION"},
}
# Settings that other variables of sbatch may change. Their values are not read, so these settings are not checked.
_NOT_READ = {
    "mem": r"MEM_PER_\w+",
    "gpus": r"GRES|GPUS\w*|TRES_PER_\w+",
    "gres": r"GRES|GPUS\w*|TRES_PER_\w+",
    "array": r"ARRAY\w*",
    "signal_notice_s": r"SIGNAL",
    "cpus": r"OVERCOMMIT|CPUS_\w+|THREADS?_\w+|CORE_SPEC|HINT|TRES_PER_\w+",
}
_OVERCOMMIT = frozenset({"overcommit", "O"})
_OF_SRUN = (*_VARIABLES, "cpus_per_task", "gpus_per_node", "gres", "mem")
_SHORT = {"p": "partition", "A": "account", "q": "qos", "t": "time", "C": "constraint", "c": "cpus-per-task"}
_OTHER_CLUSTERS = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
_MOST_NAMES = 8


@dataclass(frozen=True)
class Problem:
    """One value that the cluster cannot provide. `setting` is the name of the job's setting."""

    setting: str
    what: str
    got: str
    allowed: str
    hint: str = ""


@dataclass(frozen=True)
class ResourceRequest:
    """What sbatch or srun reads: options, and environment variables that replace them."""

    spec: JobSpec
    from_variables: Mapping[str, str] = field(default_factory=dict)  # the variable that sets each setting
    options: frozenset[str] = frozenset()  # options of extra #SBATCH lines, without dashes
    may_leave_cluster: bool = False
    has_known_cpus: bool = True

    @property
    def partitions(self) -> list[str]:
        return [name for name in self.spec.partition.split(",") if name]

    @property
    def cpus_per_node(self) -> int:
        return self.spec.tasks_per_node * max(1, self.spec.cpus_per_task)

    @property
    def gres(self) -> tuple[Gres, ...]:
        """The generic resources of a node, as far as they can be parsed."""
        wanted = read_gres(self.spec.gres)
        if wanted is None or self.spec.gres.lower() == "none":
            return ()
        if self.spec.gpus and not any(item.name == "gpu" for item in wanted):
            wanted += read_gres(f"gpu:{self.spec.gpus}") or ()
        return wanted

    def without_names(self) -> ResourceRequest:
        """The request without what a site plugin may change: GPU types, features, and the array."""
        gpus = sum(item.count for item in self.gres if item.name == "gpu")
        gres = f"gpu:{gpus}" if gpus and self.spec.gres else ""
        return replace(self, spec=replace(self.spec, constraint="", array="", gpus=str(gpus or ""), gres=gres))

    @property
    def time_s(self) -> int | None:
        """Slurm rounds up to minutes. None if it is not given or cannot be parsed."""
        try:
            return -(-parse_time_s(self.spec.time) // 60) * 60 if self.spec.time else None
        except UserError:
            return None

    def named(self, setting: str) -> str:
        """The value as given, for an error screen."""
        value = getattr(self.spec, setting)
        if setting in self.from_variables:
            return f"{self.from_variables[setting]}={value}"
        return f"--{setting.replace('_', '-')} {value}"


def as_sbatch_reads(spec: JobSpec, environment: Mapping[str, str]) -> ResourceRequest:
    """For sbatch, variables take precedence over the lines of a script."""
    variables = {name: f"SBATCH_{ending}" for name, ending in _VARIABLES.items() if environment.get(f"SBATCH_{ending}")}
    changed: dict[str, str | int] = {name: environment[variable] for name, variable in variables.items()}
    endings = [name.removeprefix("SBATCH_") for name in environment if name.startswith("SBATCH_")]
    not_read = {name for name, pattern in _NOT_READ.items() if any(re.fullmatch(pattern, end) for end in endings)}
    changed |= {name: 0 if name == "signal_notice_s" else "" for name in not_read - {"cpus"}}
    request = _request(replace(spec, **changed), variables, spec.sbatch, environment)  # type: ignore[arg-type]
    has_known_cpus = request.has_known_cpus and "cpus" not in not_read and "SLURM_HINT" not in environment
    return replace(request, has_known_cpus=has_known_cpus)


def as_srun_reads(nodes: int, tasks: int, words: Sequence[str], environment: Mapping[str, str]) -> ResourceRequest:
    """An allocation for `tasks` on each node. For srun, options take precedence over variables."""
    given: dict[str, str] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        match = re.fullmatch(r"--(?P<long>[a-z-]+)(=(?P<value>.*))?|-(?P<short>[A-Za-z])(?P<joined>.*)", word)
        if match is None:
            continue
        name = match["long"] or _SHORT.get(match["short"], match["short"])
        value = match["value"] if match["long"] else match["joined"]
        if not value and left and not left[0].startswith("-"):
            value = left.pop(0)
        given[name.replace("-", "_")] = value or ""
    variables = {
        name: f"SLURM_{ending}"
        for name, ending in _VARIABLES.items()
        if name not in given and environment.get(f"SLURM_{ending}")
    }
    values = {name: given[name] for name in _OF_SRUN if name in given}
    values |= {name: environment[variable] for name, variable in variables.items()}
    cpus = values.pop("cpus_per_task", "")
    values["gpus"] = values.pop("gpus_per_node", "")
    spec = JobSpec(nodes=nodes, ranks_per_node=tasks, start="ranks", resume="", **values)  # type: ignore[arg-type]
    request = _request(replace(spec, cpus_per_task=read_number(cpus) or 0), variables, words, environment)
    has_known_cpus = request.has_known_cpus and "SLURM_OVERCOMMIT" not in environment
    return replace(request, has_known_cpus=has_known_cpus)


def _request(
    spec: JobSpec, variables: Mapping[str, str], words: Sequence[str], environment: Mapping[str, str]
) -> ResourceRequest:
    options = frozenset(re.split(r"[=\s]", word.lstrip("-"), maxsplit=1)[0] for word in words if word.startswith("-"))
    leaves = any(environment.get(name) for name in _OTHER_CLUSTERS)
    leaves = leaves or bool(options & {"clusters", "cluster", "cluster-constraint"})
    leaves = leaves or any(re.match(r"-M", word) for word in words)
    return ResourceRequest(spec, variables, options, leaves, has_known_cpus=not options & _OVERCOMMIT)


# --- Text -------------------------------------------------------------------------------------------------------------


def some_names(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return (", ".join(listed[:_MOST_NAMES]) or "none") + more


def nearest(name: str, names: Iterable[str]) -> str:
    listed = list(names)
    return (difflib.get_close_matches(name, listed, n=1) or listed)[0]


def slurm_time(seconds: int) -> str:
    """Format seconds for --time."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
