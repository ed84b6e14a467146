"""The settings of a cluster job: the flags of `paceline submit`, and site profiles with the same keys in a file.

A profile holds settings that a user would otherwise type every day (account, partition, modules). The file is
`~/.config/paceline/sites.yaml`, or the one that $PACELINE_SITES names:

    default:              # used when no --site is given
      account: proj42
      partition: gpu
      modules: [cuda/12.4]
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from paceline.errors import UserError
from paceline.settings.small_files import YamlError, compose_yaml
from paceline.settings.text import check_text

SITES_VARIABLE = "PACELINE_SITES"
DEFAULT_SITE = "default"
Kind = Literal["text", "number", "list", "lines", "switch"]


@dataclass(frozen=True)
class JobSetting:
    """One flag of `paceline submit`; in a profile the same name with underscores."""

    name: str
    metavar: str
    help: str
    kind: Kind = "text"  # list: words, by commas or by repeating the flag; lines: one whole text per flag
    in_profile: bool = True

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


@dataclass(frozen=True)
class Given:
    """The given values of a setting, and their place."""

    values: tuple[str, ...]
    where: str


JobSettings = dict[str, Given]


def check_given(settings: JobSettings) -> None:
    """Every value must be one line: it becomes a line of a script, or a scalar of a manifest."""
    for name, given in settings.items():
        for value in given.values:
            check_text(value, name, where=given.where, is_secret=name == "env")


@cache
def job_settings() -> dict[str, JobSetting]:
    """Every setting by name, in the order of `--help`."""
    settings = [
        JobSetting("nodes", "N", "nodes (1)", "number"),
        JobSetting("gpus_per_node", "N", "GPUs, and ranks, per node; TYPE:N requests a type"),
        JobSetting("processes_per_node", "N", "ranks per node, on CPUs", "number"),
        JobSetting("time", "LIMIT", "time limit: MINUTES, HH:MM:SS or D-HH:MM:SS"),
        JobSetting("start", "HOW", "agent (one per node, restarts its ranks), ranks (one task per rank) or torchrun"),
        JobSetting(
            "signal_notice", "S", "seconds before the limit at which the run saves and requeues (120)", "number"
        ),
        JobSetting("max_requeues", "N", "how often the job may be requeued without a step of progress (3)", "number"),
        JobSetting("site", "NAME", "site profile with settings", in_profile=False),
        JobSetting("account", "NAME", "account that pays"),
        JobSetting("partition", "NAME", "partition (queue)"),
        JobSetting("qos", "NAME", "quality of service"),
        JobSetting("constraint", "LIST", "node features"),
        JobSetting("reservation", "NAME", "reservation"),
        JobSetting("cpus_per_task", "N", "CPUs per task; an agent and its ranks are one task", "number"),
        JobSetting("mem", "SIZE", "memory per node, for example 64G"),
        JobSetting("gres", "LIST", "generic resources, for example gpu:a100:4"),
        JobSetting("modules", "LIST", "environment modules to load", "list"),
        JobSetting("venv", "FOLDER", "virtual environment to activate"),
        JobSetting("conda", "NAME", "conda environment to activate"),
        JobSetting("container_image", "IMAGE", "run in this container (pyxis and enroot)"),
        JobSetting("environment", "EDF", "run in the container of this environment definition file"),
        JobSetting("sbatch", '"--X=Y"', "one more #SBATCH line; may be repeated", "lines"),
        JobSetting("env", "NAME[=VALUE]", "variable of the job; NAME alone: its value here; may be repeated", "lines"),
        JobSetting("array", "SPEC", "job array, for example 0-3; each task has its own folder", in_profile=False),
        JobSetting("job_name", "NAME", "name in the queue (default: the recipe's)", in_profile=False),
        JobSetting("dry_run", "", "print the script, submit nothing", "switch", in_profile=False),
    ]
    return {setting.name: setting for setting in settings}


def read_site(name: str | None, environment: Mapping[str, str] = os.environ) -> JobSettings:
    """The settings of a profile; without a name those of `default`, if there is one."""
    path = sites_path(environment)
    if not path.is_file():
        if name is not None or SITES_VARIABLE in environment:
            raise UserError("there is no file of site profiles", where=str(path), hint=_example())
        return {}
    profiles = _read_profiles(path)
    if name is None:
        return profiles.get(DEFAULT_SITE, {})
    if name not in profiles:
        close = difflib.get_close_matches(name, profiles, n=1)
        raise UserError(
            f"there is no site {name!r}",
            where=str(path),
            allowed=", ".join(profiles) or "none: the file is empty",
            hint=f"--site {close[0]}" if close else None,
        )
    return profiles[name]


def sites_path(environment: Mapping[str, str] = os.environ) -> Path:
    given = environment.get(SITES_VARIABLE)
    return Path(given) if given else Path.home() / ".config" / "paceline" / "sites.yaml"


def _example() -> str:
    return "for example:\ndefault:\n  account: proj42\n  partition: gpu"


def _read_profiles(path: Path) -> dict[str, JobSettings]:
    """Composed, not constructed, like recipes: every value stays the text in the file, with its line."""
    try:
        root = compose_yaml(path)
    except YamlError as error:
        raise UserError(f"the site profiles are not valid YAML: {error}", where=error.place(path)) from error
    except OSError as error:
        raise UserError("the site profiles cannot be read", where=str(path), got=error.strerror) from error
    if root is None:
        return {}
    return {name: dict(_profile(name, node, path)) for name, node in _pairs(root, path, "sites.yaml")}


def _pairs(node: object, path: Path, what: str) -> list[tuple[str, object]]:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        line = f", line {node.start_mark.line + 1}" if isinstance(node, yaml.Node) else ""
        raise UserError(f"{what} must be `key: value` lines", where=f"{path}{line}", hint=_example())
    return [(str(key.value), value) for key, value in node.value]


def _profile(profile: str, node: object, path: Path) -> Iterator[tuple[str, Given]]:
    import yaml

    known = {name: setting for name, setting in job_settings().items() if setting.in_profile}
    for key, value in _pairs(node, path, f"site {profile!r}"):
        assert isinstance(value, yaml.Node)
        where = f"{path}, line {value.start_mark.line + 1}"
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"unknown key {key!r} of site {profile!r}",
                where=where,
                allowed=None if close else ", ".join(known),
                hint=f"perhaps you meant {close[0]}" if close else None,
            )
        yield name, Given(_values(known[name], value, where), where)


def _values(setting: JobSetting, node: object, where: str) -> tuple[str, ...]:
    import yaml

    is_many = setting.kind in ("list", "lines")
    if isinstance(node, yaml.SequenceNode) and is_many:
        return tuple(_scalar(setting, item, where) for item in node.value)
    if isinstance(node, yaml.MappingNode) and setting.name == "env":
        pairs = [[_scalar(setting, part, where) for part in pair] for pair in node.value]
        return tuple(f"{name}={value}" for name, value in pairs)
    return split_words(setting, _scalar(setting, node, where))


def _scalar(setting: JobSetting, node: object, where: str) -> str:
    import yaml

    if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
        found = "nothing" if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
        raise UserError(f"{setting.name} needs a value", where=where, got=found, allowed="text or a number")
    return check_text(str(node.value), setting.name, where=where, is_secret=setting.name == "env")


def split_words(setting: JobSetting, text: str) -> tuple[str, ...]:
    """`cuda/12,gcc/13` is two modules. In other settings a comma is part of the value."""
    return tuple(text.replace(",", " ").split()) if setting.kind == "list" else (text,)
