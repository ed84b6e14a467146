"""A Slurm job: its flags, declared once for the command line, for site profiles and for help, and its rules."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from paceline.errors import UserError, printable_line
from paceline.launch.job_record import SECRET_PREFIX
from paceline.runtime.secret import RUN_SECRET
from paceline.settings.declare import Arg, Range
from paceline.settings.values import Setting, build, invalid

_VARIABLE_FORMS = "NAME=VALUE, or NAME alone to take its value from the environment of paceline submit"
_TIME = re.compile(
    r"(?:(?P<minutes>\d{1,9})(?::(?P<seconds>\d\d))?"
    r"|(?P<h>\d{1,9}):(?P<m>\d\d):(?P<s>\d\d)"
    r"|(?P<days>\d{1,9})-(?P<dh>\d{1,2})(?::(?P<dm>\d\d)(?::(?P<ds>\d\d))?)?)"
)
_TIME_FORMS = "MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
_INDEX = r"\d{1,9}"
_RANGE = rf"{_INDEX}(-{_INDEX}(:{_INDEX})?)?"
_ARRAY = re.compile(rf"{_RANGE}(,{_RANGE})*(%{_INDEX})?")
_GPUS = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d{1,4})")
_LONGEST_NOTICE_S = 65535  # Slurm stores it in 16 bits
_OWN_VARIABLES = ("RANK", "WORLD_SIZE", "PACELINE_START", "PACELINE_MAX_REQUEUES", RUN_SECRET)
# Lines that the script writes itself, and the flag that decides each.
_OWN_LINES = {
    **{name: f"--{name}" for name in ("nodes", "gpus-per-node", "time", "account", "partition", "qos", "constraint")},
    **{name: f"--{name}" for name in ("reservation", "cpus-per-task", "mem", "gres", "array", "job-name")},
    **{"ntasks": "--processes-per-node", "ntasks-per-node": "--processes-per-node", "signal": "--signal-notice-s"},
    **{"output": "--output-dir", "chdir": "submit from that folder", "open-mode": "leave it out"},
    **{"requeue": "leave it out", "N": "--nodes", "n": "--processes-per-node", "t": "--time", "p": "--partition"},
    **{"A": "--account", "c": "--cpus-per-task", "J": "--job-name", "o": "--output-dir", "a": "--array"},
    **{"q": "--qos", "C": "--constraint"},
}


def parse_time_s(text: str, where: str = "flag --time") -> int:
    """A duration in one of Slurm's forms, in seconds."""
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


def parse_word(text: str, setting: Setting) -> str:
    """A value of one #SBATCH line."""
    if not text or not text.isprintable() or " " in text:
        raise invalid(setting, text, "text without spaces")
    return text


def parse_line(text: str, setting: Setting) -> str:
    if not text or not text.isprintable():
        raise invalid(setting, text, "text on one line")
    return text


def _parse_gpus(text: str, setting: Setting) -> str:
    if not (match := _GPUS.fullmatch(text)) or int(match[1]) == 0:
        raise invalid(setting, text, "a number, or TYPE:NUMBER")
    return text


def _parse_time(text: str, setting: Setting) -> str:
    parse_time_s(text, setting.where)
    return text


def _parse_mem(text: str, setting: Setting) -> str:
    if not re.fullmatch(r"[0-9]{1,18}[KMGT]?", text, re.IGNORECASE):
        raise invalid(setting, text, "a number with K, M, G or T, as 64G")
    return text


def _parse_array(text: str, setting: Setting) -> str:
    if not _ARRAY.fullmatch(text):
        raise invalid(setting, text, "such as 0-7, 1,3,5 or 0-99%10")
    return text


def _parse_option(text: str, setting: Setting) -> str:
    """An extra #SBATCH line, without that word. Lines that the script writes itself are refused."""
    option = text.strip().removeprefix("#SBATCH").strip()
    match = re.match(r"--?(?P<name>[A-Za-z][A-Za-z-]*)", option)
    if match is None or not option.isprintable():
        raise UserError(
            "this is not an option of sbatch", where=setting.where, got=repr(text), allowed="such as --exclusive"
        )
    name = match["name"] if option.startswith("--") else match["name"][0]
    if name in _OWN_LINES:
        raise UserError(f"the script sets {match[0]} itself", where=setting.where, got=option, hint=_OWN_LINES[name])
    return option


def _parse_variable(text: str, setting: Setting) -> str:
    where = setting.where
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


# --- The job ----------------------------------------------------------------------------------------------------------

Word = Annotated[str, Arg("NAME", parse=parse_word)]
Start = Literal["agent", "ranks", "torchrun"]


@dataclass(frozen=True)
class SlurmFlags:
    """The flags of `paceline submit slurm`. A site profile holds most of them, under the same names."""

    nodes: Annotated[int, Range(low=1)] = 1
    """Nodes."""
    gpus_per_node: Annotated[str, Arg("[TYPE:]N", parse=_parse_gpus)] = ""
    """GPUs, and ranks, per node; TYPE:N requests a type."""
    processes_per_node: Annotated[int | None, Range(low=1)] = None
    """Ranks per node, on CPUs."""
    time: Annotated[str, Arg("LIMIT", parse=_parse_time)] = ""
    """Time limit: MINUTES, HH:MM:SS or D-HH:MM:SS."""
    start: Start = "agent"
    """agent: one per node, which restarts its ranks. ranks: one task per rank. torchrun."""
    signal_notice_s: Annotated[int, Range(low=0, high=_LONGEST_NOTICE_S), Arg("S")] = 120
    """Seconds before the limit at which the run saves and requeues."""
    max_requeues: Annotated[int, Range(low=0)] = 3
    """How often the job may be requeued without a step of progress."""
    site: Annotated[str | None, Arg("NAME", in_site=False)] = None
    """The site profile to use (default, if there is one, unless given)."""
    account: Word = ""
    """Account that pays."""
    partition: Word = ""
    """Partition (queue)."""
    qos: Word = ""
    """Quality of service."""
    constraint: Annotated[str, Arg("LIST", parse=parse_word)] = ""
    """Node features."""
    reservation: Word = ""
    """Reservation."""
    cpus_per_task: Annotated[int, Range(low=1)] = 0
    """CPUs per task; an agent and its ranks are one task (computed from the ranks unless given)."""
    mem: Annotated[str, Arg("SIZE", parse=_parse_mem)] = ""
    """Memory per node, for example 64G."""
    gres: Annotated[str, Arg("LIST", parse=parse_word)] = ""
    """Generic resources, for example gpu:a100:4."""
    modules: Annotated[tuple[str, ...], Arg("LIST", many="commas", parse=parse_line)] = ()
    """Environment modules to load."""
    venv: Annotated[str, Arg("FOLDER", parse=parse_line)] = ""
    """Virtual environment to activate."""
    conda: Annotated[str, Arg("NAME", parse=parse_line)] = ""
    """Conda environment to activate."""
    container_image: Annotated[str, Arg("IMAGE", parse=parse_line)] = ""
    """Run in this container (pyxis and enroot)."""
    environment: Annotated[str, Arg("EDF", parse=parse_line)] = ""
    """Run in the container of this environment definition file."""
    sbatch: Annotated[
        tuple[str, ...], Arg('"--X=Y"', many="lines", parse=_parse_option, may_begin_with_dashes=True)
    ] = ()
    """One more #SBATCH line; may be repeated."""
    env: Annotated[tuple[str, ...], Arg("NAME[=VALUE]", many="lines", parse=_parse_variable, is_secret=True)] = ()
    """Variable of the job; NAME alone: its value here; may be repeated."""
    array: Annotated[str, Arg("SPEC", parse=_parse_array, in_site=False)] = ""
    """Job array, for example 0-3; each task has its own folder."""
    job_name: Annotated[str, Arg("NAME", parse=parse_word, in_site=False)] = ""
    """Name in the queue (the recipe's unless given)."""


@dataclass(frozen=True)
class JobSpec(SlurmFlags):
    """Everything that the script contains: the flags, and what is computed from them and from the recipe."""

    name: str = "paceline"
    folder: Path = Path()
    work_dir: Path = Path()
    train: tuple[str, ...] = ()  # the arguments of `paceline train`, without folder and --resume
    resume: str = "auto"  # the checkpoint of the first start; empty: the run may not be started twice
    python: str = "python"
    ranks_per_node: int = 1
    gpus: str = ""  # in the form of Slurm, 4 or a100:4; empty: ranks on CPUs
    container_mounts: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def tasks_per_node(self) -> int:
        return self.ranks_per_node if self.start == "ranks" else 1

    def default_cpus(self, threads_per_rank: int) -> int:
        """CPUs of a task, unless given. Slurm's own default is one, which all ranks of an agent would share."""
        return threads_per_rank * self.ranks_per_node // self.tasks_per_node


def parse_job(settings: Mapping[str, Setting]) -> JobSpec:
    """The flags of a job, checked one by one and together."""
    flags = build(SlurmFlags, settings.values())
    gpus, ranks = _count_ranks(flags, settings)
    spec = JobSpec(**vars(flags), name=flags.job_name or JobSpec.name, gpus=gpus, ranks_per_node=ranks)
    _check_time(spec, settings)
    _check_cores(spec, settings)
    _check_software(spec, settings)
    return spec


# --- Several together -------------------------------------------------------------------------------------------------


def _count_ranks(flags: SlurmFlags, settings: Mapping[str, Setting]) -> tuple[str, int]:
    """GPUs in the form of Slurm, and ranks, of each node."""
    gres_gpus = count_gres_gpus(flags.gres)
    if flags.gpus_per_node and flags.processes_per_node:
        raise UserError(
            "ranks per node are given twice",
            got=f"{_typed(settings, 'gpus_per_node')} and {_typed(settings, 'processes_per_node')}",
            hint="--gpus-per-node has one rank on each GPU; --processes-per-node is for CPUs",
        )
    if flags.processes_per_node:
        if gres_gpus:
            raise UserError(
                "ranks on CPUs, with GPUs that would not be used",
                where=settings["gres"].where,
                got=f"{_typed(settings, 'processes_per_node')} and {_typed(settings, 'gres')}",
                hint=f"--gpus-per-node {gres_gpus}",
            )
        return "", flags.processes_per_node
    if not flags.gpus_per_node:
        if gres_gpus:
            return str(gres_gpus), gres_gpus
        raise UserError(
            "the number of ranks per node is missing",
            allowed="--gpus-per-node N, or --processes-per-node N on CPUs",
            hint="sinfo -o '%P %D %c %G' lists partitions, their nodes, CPUs and GPUs",
        )
    match = _GPUS.fullmatch(flags.gpus_per_node)
    assert match is not None
    gpus = int(match[1])
    if gres_gpus and gres_gpus != gpus:
        raise UserError(
            "two different numbers of GPUs",
            where=f"{settings['gpus_per_node'].where} and {settings['gres'].where}",
            got=f"{gpus} and {gres_gpus}",
            hint="leave one out",
        )
    return flags.gpus_per_node, gpus


def _check_time(spec: JobSpec, settings: Mapping[str, Setting]) -> None:
    if not spec.time:
        return
    limit_s = parse_time_s(spec.time, settings["time"].where)
    if limit_s <= spec.signal_notice_s:
        raise UserError(
            "the warning signal would come before the job starts",
            where=settings["time"].where,
            got=f"a limit of {limit_s} s, a notice of {spec.signal_notice_s} s before it",
            allowed=f"a limit above {spec.signal_notice_s} s",
            hint=f"a longer --time, or --signal-notice-s {limit_s // 4}",
        )


def _check_cores(spec: JobSpec, settings: Mapping[str, Setting]) -> None:
    if spec.cpus_per_task and spec.start != "ranks" and spec.ranks_per_node > spec.cpus_per_task:
        raise UserError(
            "more ranks than CPUs on a node",
            where=settings["cpus_per_task"].where,
            got=f"{spec.ranks_per_node} ranks below one task of {spec.cpus_per_task} CPUs",
            allowed=f"{spec.ranks_per_node} or more",
            hint=f"--cpus-per-task {spec.ranks_per_node}, or --start ranks to give each rank {spec.cpus_per_task}",
        )


def _check_software(spec: JobSpec, settings: Mapping[str, Setting]) -> None:
    """Only one of container, venv and conda."""
    sources = [name for name in ("container_image", "environment", "venv", "conda") if getattr(spec, name)]
    if len(sources) > 1:
        raise UserError(
            "two environments for python",
            where=" and ".join(settings[name].where for name in sources),
            got=" and ".join(_typed(settings, name) for name in sources),
            hint="leave one out; in a container, its own python is used",
        )


def _typed(settings: Mapping[str, Setting], name: str) -> str:
    return f"{settings[name].field.flag} {settings[name].values[-1]}"
