"""What a job asks Slurm for, as sbatch reads it, and one thing that the cluster cannot give."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from paceline.errors import UserError
from paceline.launch.job import JobSpec, parse_time_s
from paceline.launch.slurm_facts import Gres, read_gres

# sbatch prefers these to the lines of a script.
_VARIABLES = {
    **{"partition": "SBATCH_PARTITION", "account": "SBATCH_ACCOUNT", "qos": "SBATCH_QOS"},
    **{"time": "SBATCH_TIMELIMIT", "constraint": "SBATCH_CONSTRAINT", "reservation": "SBATCH_RESERVATION"},
}
_OTHER_CLUSTERS = ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")
_MOST_NAMES = 8


@dataclass(frozen=True)
class Problem:
    """One value that the cluster cannot give. `setting` is its name among the settings of a job."""

    setting: str
    what: str
    got: str
    allowed: str
    hint: str = ""


@dataclass(frozen=True)
class Request:
    """What sbatch reads: the script, and the variables that it prefers to the script."""

    spec: JobSpec
    from_variables: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()  # of extra #SBATCH lines, without dashes
    may_leave_cluster: bool = False

    @property
    def partitions(self) -> list[str]:
        return [name for name in self.spec.partition.split(",") if name]

    @property
    def cpus_per_node(self) -> int:
        return self.spec.tasks_per_node * max(1, self.spec.cpus_per_task)

    @property
    def gres(self) -> tuple[Gres, ...]:
        """Of a node."""
        wanted = read_gres(self.spec.gres)
        if self.spec.gpus and not any(item.name == "gpu" for item in wanted):
            wanted += read_gres(f"gpu:{self.spec.gpus}")
        return wanted

    @property
    def time_s(self) -> int | None:
        """Slurm counts whole minutes. None: not said, or not understood."""
        try:
            return -(-parse_time_s(self.spec.time) // 60) * 60 if self.spec.time else None
        except UserError:
            return None

    def variable(self, setting: str) -> str:
        """The variable that decides this setting, if one does."""
        return f"variable {_VARIABLES[setting]}" if setting in self.from_variables else ""

    def named(self, setting: str) -> str:
        """The value as it was given, for a screen."""
        value = getattr(self.spec, setting)
        if setting in self.from_variables:
            return f"{_VARIABLES[setting]}={value}"
        return f"--{setting.replace('_', '-')} {value}"


def as_sbatch_reads(spec: JobSpec, environment: Mapping[str, str]) -> Request:
    changed = {name: environment[variable] for name, variable in _VARIABLES.items() if environment.get(variable)}
    options = frozenset(re.split(r"[=\s]", line.lstrip("-"), maxsplit=1)[0] for line in spec.sbatch)
    leaves = any(environment.get(name) for name in _OTHER_CLUSTERS)
    leaves = leaves or bool(options & {"clusters", "cluster", "cluster-constraint"})
    leaves = leaves or any(re.match(r"-M", line) for line in spec.sbatch)
    return Request(replace(spec, **changed), frozenset(changed), options, leaves)  # type: ignore[arg-type]


# --- Words ------------------------------------------------------------------------------------------------------------


def some_names(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return (", ".join(listed[:_MOST_NAMES]) or "none") + more


def nearest(name: str, names: Iterable[str]) -> str:
    listed = list(names)
    return (difflib.get_close_matches(name, listed, n=1) or listed)[0]


def slurm_time(seconds: int) -> str:
    """As --time wants it."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
