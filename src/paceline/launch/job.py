"""A job for a cluster, as data, and what must hold for it before it may stand in a queue."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from paceline.errors import UserError, printable_line
from paceline.launch.job_record import SECRET_PREFIX
from paceline.runtime.secret import RUN_SECRET
from paceline.settings.sites import Given, JobSettings, check_given, job_settings

Start = Literal["agent", "ranks", "torchrun"]
_VARIABLE_FORMS = "NAME=VALUE, or NAME alone to take its value from the environment of paceline submit"
_STARTS: tuple[Start, ...] = get_args(Start)
_TIME = re.compile(
    r"(?:(?P<minutes>\d{1,9})(?::(?P<seconds>\d\d))?"
    r"|(?P<h>\d{1,9}):(?P<m>\d\d):(?P<s>\d\d)"
    r"|(?P<days>\d{1,9})-(?P<dh>\d{1,2})(?::(?P<dm>\d\d)(?::(?P<ds>\d\d))?)?)"
)
_TIME_FORMS = "MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
_INDEX = r"\d{1,9}"
_RANGE = rf"{_INDEX}(-{_INDEX}(:{_INDEX})?)?"
_ARRAY = re.compile(rf"{_RANGE}(,{_RANGE})*(%{_INDEX})?")
_LONGEST_NOTICE_S = 65535  # Slurm keeps it in 16 bits
_OWN_VARIABLES = ("RANK", "WORLD_SIZE", "PACELINE_START", "PACELINE_MAX_REQUEUES", RUN_SECRET)
# What the script writes itself, and which flag of ours decides it.
_OWN_LINES = {
    **{name: f"--{name}" for name in ("nodes", "gpus-per-node", "time", "account", "partition", "qos", "constraint")},
    **{name: f"--{name}" for name in ("reservation", "cpus-per-task", "mem", "gres", "array", "job-name")},
    **{"ntasks": "--processes-per-node", "ntasks-per-node": "--processes-per-node", "signal": "--signal-notice"},
    **{"output": "--output-dir", "chdir": "submit from that folder", "open-mode": "leave it out"},
    **{"requeue": "leave it out", "N": "--nodes", "n": "--processes-per-node", "t": "--time", "p": "--partition"},
    **{"A": "--account", "c": "--cpus-per-task", "J": "--job-name", "o": "--output-dir", "a": "--array"},
    **{"q": "--qos", "C": "--constraint"},
}


@dataclass(frozen=True)
class JobSpec:
    """Everything the script says. `train` holds the arguments of `paceline train`, less folder and --resume."""

    name: str = "paceline"
    folder: Path = Path()
    work_dir: Path = Path()
    train: tuple[str, ...] = ()
    resume: str = "auto"  # what the first start goes on from; empty: the run may not be started twice
    python: str = "python"
    nodes: int = 1
    ranks_per_node: int = 1
    gpus: str = ""  # as Slurm wants it, 4 or a100:4; empty: ranks on CPUs
    time: str = ""
    start: Start = "agent"
    signal_notice_s: int = 120
    max_requeues: int = 3
    account: str = ""
    partition: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    cpus_per_task: int = 0  # 0: Slurm's own default
    mem: str = ""
    gres: str = ""
    modules: tuple[str, ...] = ()
    venv: str = ""
    conda: str = ""
    container_image: str = ""
    container_mounts: tuple[str, ...] = ()
    environment: str = ""
    sbatch: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    array: str = ""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def tasks_per_node(self) -> int:
        return self.ranks_per_node if self.start == "ranks" else 1

    def default_cpus(self, threads_per_rank: int) -> int:
        """Of a task, when nobody says: Slurm's own default, one, would make all ranks of an agent share it."""
        return threads_per_rank * self.ranks_per_node // self.tasks_per_node


def parse_job(settings: JobSettings) -> JobSpec:
    """The cluster's part of a spec. Every value, and what contradicts what, is judged here."""
    check_given(settings)
    gpus, ranks = _parse_ranks(settings)
    spec = JobSpec(
        name=_text(settings, "job_name") or "paceline",
        nodes=_number(settings, "nodes", 1, low=1),
        ranks_per_node=ranks,
        gpus=gpus,
        time=_text(settings, "time"),
        start=_parse_start(settings),
        signal_notice_s=_number(settings, "signal_notice", 120, high=_LONGEST_NOTICE_S),
        max_requeues=_number(settings, "max_requeues", 3),
        account=_text(settings, "account"),
        partition=_text(settings, "partition"),
        qos=_text(settings, "qos"),
        constraint=_text(settings, "constraint"),
        reservation=_text(settings, "reservation"),
        cpus_per_task=_number(settings, "cpus_per_task", 0, low=1),
        mem=_parse_mem(settings),
        gres=_text(settings, "gres"),
        modules=_values(settings, "modules"),
        venv=_text(settings, "venv", spaces=True),
        conda=_text(settings, "conda", spaces=True),
        container_image=_text(settings, "container_image", spaces=True),
        environment=_text(settings, "environment", spaces=True),
        sbatch=tuple(_parse_line(line, settings) for line in _values(settings, "sbatch")),
        env=tuple(_parse_variable(text, settings) for text in _values(settings, "env")),
        array=_parse_array(settings),
    )
    _check_time(spec, settings)
    _check_cores(spec, settings)
    _check_software(spec, settings)
    return spec


def parse_time_s(text: str, where: str = "flag --time") -> int:
    """Slurm's ways to write a duration, in seconds."""
    match = _TIME.fullmatch(text.strip())
    part = {name: int(value) for name, value in match.groupdict().items() if value} if match else {}
    seconds = 60 * part.get("minutes", 0) + part.get("seconds", 0)
    seconds += 3600 * part.get("h", 0) + 60 * part.get("m", 0) + part.get("s", 0)
    seconds += 86400 * part.get("days", 0) + 3600 * part.get("dh", 0) + 60 * part.get("dm", 0) + part.get("ds", 0)
    too_large = any(part.get(name, 0) > 59 for name in ("seconds", "m", "s", "dm", "ds")) or part.get("dh", 0) > 23
    if match is None or too_large or seconds == 0:
        raise UserError("this is not a time limit", where=where, got=repr(text), allowed=_TIME_FORMS)
    return seconds


def count_gres_gpus(gres: str) -> int:
    """GPUs of a node in a list of generic resources such as gpu:a100:4,shard:2."""
    total = 0
    for item in gres.split(","):
        name, *rest = item.strip().split("(")[0].replace("=", ":").split(":")
        if name == "gpu":
            total += int(rest[-1]) if rest and re.fullmatch(r"\d{1,9}", rest[-1]) else 1
    return total


# --- One value --------------------------------------------------------------------------------------------------------


def _values(settings: JobSettings, name: str) -> tuple[str, ...]:
    return settings[name].values if name in settings else ()


def _text(settings: JobSettings, name: str, *, spaces: bool = False) -> str:
    """A value that goes into one #SBATCH line; a line break in it would begin another."""
    given = settings.get(name)
    if given is None:
        return ""
    value = given.values[-1]
    if not value or not value.isprintable() or (" " in value and not spaces):
        allowed = "text on one line" if spaces else "text without spaces"
        raise UserError(f"{name}: {value!r} is not valid", where=given.where, allowed=allowed)
    return value


def _number(settings: JobSettings, name: str, default: int, *, low: int = 0, high: int = 1_000_000) -> int:
    given = settings.get(name)
    if given is None:
        return default
    text = given.values[-1]
    if not (re.fullmatch(r"[0-9]{1,18}", text) and low <= int(text) <= high):
        allowed = f"a whole number from {low} up to {high}" if high < 1_000_000 else f"a whole number, {low} or more"
        raise UserError(f"{name}: {text!r} is not valid", where=given.where, allowed=allowed)
    return int(text)


def _parse_start(settings: JobSettings) -> Start:
    text = _text(settings, "start") or "agent"
    for start in _STARTS:
        if text == start:
            return start
    close = difflib.get_close_matches(text, _STARTS, n=1)
    raise UserError(
        f"start: {text!r} is not valid",
        where=settings["start"].where,
        allowed=", ".join(_STARTS),
        hint=f"--start {close[0]}" if close else None,
    )


def _parse_mem(settings: JobSettings) -> str:
    text = _text(settings, "mem")
    if text and not re.fullmatch(r"[0-9]{1,18}[KMGT]?", text, re.IGNORECASE):
        where = settings["mem"].where
        raise UserError(f"mem: {text!r} is not valid", where=where, allowed="a number with K, M, G or T, as 64G")
    return text


def _parse_array(settings: JobSettings) -> str:
    text = _text(settings, "array")
    if text and not _ARRAY.fullmatch(text):
        where = settings["array"].where
        raise UserError(f"array: {text!r} is not valid", where=where, allowed="such as 0-7, 1,3,5 or 0-99%10")
    return text


def _parse_line(line: str, settings: JobSettings) -> str:
    """An extra #SBATCH line, without that word. What we write ourselves may not be said a second time."""
    where = settings["sbatch"].where
    option = line.strip().removeprefix("#SBATCH").strip()
    match = re.match(r"--?(?P<name>[A-Za-z][A-Za-z-]*)", option)
    if match is None or not option.isprintable():
        raise UserError("this is not an option of sbatch", where=where, got=repr(line), allowed="such as --exclusive")
    name = match["name"] if option.startswith("--") else match["name"][0]
    if name in _OWN_LINES:
        raise UserError(f"the script says {match[0]} itself", where=where, got=option, hint=_OWN_LINES[name])
    return option


def _parse_variable(text: str, settings: JobSettings) -> str:
    where = settings["env"].where
    name, is_set, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UserError("this is not a variable", where=where, got=printable_line(name), allowed=_VARIABLE_FORMS)
    if name in _OWN_VARIABLES or name.startswith("SLURM_"):
        raise UserError(f"{name} belongs to the launcher", where=where, got=name, hint="leave it out")
    if value.startswith(SECRET_PREFIX):
        hint = f"--env {name}: its value is taken from the environment of paceline submit"
        raise UserError("only Kubernetes has Secrets to refer to", where=where, got=name, hint=hint)
    if not is_set and name not in os.environ:
        raise UserError(f"{name} is not set", where=where, hint=f"export {name}, or --env {name}=VALUE")
    return text


# --- Several together -------------------------------------------------------------------------------------------------


def _parse_ranks(settings: JobSettings) -> tuple[str, int]:
    """GPUs as Slurm wants them, and ranks, of each node."""
    gres_gpus = count_gres_gpus(_text(settings, "gres"))
    if "gpus_per_node" in settings and "processes_per_node" in settings:
        raise UserError(
            "ranks per node are given twice",
            got=f"{_typed(settings, 'gpus_per_node')} and {_typed(settings, 'processes_per_node')}",
            hint="--gpus-per-node has one rank on each GPU; --processes-per-node is for CPUs",
        )
    if "processes_per_node" in settings:
        if gres_gpus:
            raise UserError(
                "ranks on CPUs, and GPUs nobody would use",
                where=settings["gres"].where,
                got=f"{_typed(settings, 'processes_per_node')} and {_typed(settings, 'gres')}",
                hint=f"--gpus-per-node {gres_gpus}",
            )
        return "", _number(settings, "processes_per_node", 0, low=1)
    if "gpus_per_node" not in settings:
        if gres_gpus:
            return str(gres_gpus), gres_gpus
        raise UserError(
            "how many ranks has a node?",
            allowed="--gpus-per-node N, or --processes-per-node N on CPUs",
            hint="sinfo -o '%P %D %c %G' lists partitions, their nodes, CPUs and GPUs",
        )
    text = _text(settings, "gpus_per_node")
    match = re.fullmatch(r"(?:[A-Za-z][\w.-]*:)?(\d{1,4})", text)
    if match is None or int(match[1]) == 0:
        where = settings["gpus_per_node"].where
        raise UserError(f"gpus_per_node: {text!r} is not valid", where=where, allowed="a number, or TYPE:NUMBER")
    if gres_gpus and gres_gpus != int(match[1]):
        raise UserError(
            "two different numbers of GPUs",
            where=f"{settings['gpus_per_node'].where} and {settings['gres'].where}",
            got=f"{match[1]} and {gres_gpus}",
            hint="leave one out",
        )
    return text, int(match[1])


def _check_time(spec: JobSpec, settings: JobSettings) -> None:
    if not spec.time:
        return
    limit_s = parse_time_s(spec.time, settings["time"].where)
    if limit_s <= spec.signal_notice_s:
        raise UserError(
            "the warning signal would come before the job starts",
            where=settings["time"].where,
            got=f"a limit of {limit_s} s, a notice of {spec.signal_notice_s} s before it",
            allowed=f"a limit above {spec.signal_notice_s} s",
            hint=f"a longer --time, or --signal-notice {limit_s // 4}",
        )


def _check_cores(spec: JobSpec, settings: JobSettings) -> None:
    if spec.cpus_per_task and spec.start != "ranks" and spec.ranks_per_node > spec.cpus_per_task:
        raise UserError(
            "more ranks than CPUs on a node",
            where=settings["cpus_per_task"].where,
            got=f"{spec.ranks_per_node} ranks below one task of {spec.cpus_per_task} CPUs",
            allowed=f"{spec.ranks_per_node} or more",
            hint=f"--cpus-per-task {spec.ranks_per_node}, or --start ranks to give each rank {spec.cpus_per_task}",
        )


def _check_software(spec: JobSpec, settings: JobSettings) -> None:
    """One python: of a container, of a venv or of conda."""
    sources = [name for name in ("container_image", "environment", "venv", "conda") if getattr(spec, name)]
    if len(sources) > 1:
        raise UserError(
            "two places to take python from",
            where=" and ".join(settings[name].where for name in sources),
            got=" and ".join(_typed(settings, name) for name in sources),
            hint="leave one out; in a container, its own python is used",
        )


def _typed(settings: JobSettings, name: str) -> str:
    given: Given = settings[name]
    return f"{job_settings()[name].flag} {given.values[-1]}"
