"""Prepares a Slurm job: flags over the site profile, what follows from the recipe, and the check of the cluster."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from paceline.errors import UserError
from paceline.integrations.slurm.facts import ask_slurm
from paceline.integrations.slurm.fit import describe_closed, require_possible
from paceline.integrations.slurm.request import as_sbatch_reads
from paceline.launch.job import JobSpec, SlurmFlags, count_gres_gpus
from paceline.launch.submission import default_threads
from paceline.runs.stores import is_url
from paceline.runs.trust import TRUST_FLAG
from paceline.settings.declare import fields_of
from paceline.settings.load import LoadedConfig
from paceline.settings.recipe_file import RECIPES, RESOLVED, KeyValue, pairs_of, read_pairs, setting_of, shipped_recipes
from paceline.settings.syntax import code_references
from paceline.settings.values import Setting, find_in, latest, unknown_name

SITES_VARIABLE = "PACELINE_SITES"
DEFAULT_SITE = "default"
_SOFTWARE = ("container_image", "environment", "venv", "conda")
_RANKS = ("gpus_per_node", "processes_per_node")
# Settings that the script decides.
_SET_BY_SCRIPT = ("output_dir", "resume", "load_policy", "best_is_latest", "processes")


# Site profiles: flags of `paceline submit slurm` under a name in a file.
#
# A profile holds flags that a user would otherwise type every day (account, partition, modules). The file is
# `~/.config/paceline/sites.yaml`, or the one that $PACELINE_SITES names:
#
#     default:              # used when no --site is given
#       account: proj42
#       partition: gpu
#       modules: [cuda/12.4]


def read_site(name: str | None, environment: Mapping[str, str] = os.environ) -> dict[str, Setting]:
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


def _read_profiles(path: Path) -> dict[str, dict[str, Setting]]:
    pairs = read_pairs(path, "the file of site profiles", hint=_example()) or []
    return {pair.key: _read_profile(pair, path) for pair in pairs}


def _read_profile(profile: KeyValue, path: Path) -> dict[str, Setting]:
    known = {name: field for name, field in fields_of(SlurmFlags).items() if field.arg.in_site}
    settings = []
    for pair in pairs_of(profile.node, path, f"site {profile.key!r}", hint=_example()):
        field = find_in(known, pair.key)
        if field is None:
            raise unknown_name(pair.key, pair.where, known, "submit slurm")
        settings.append(setting_of(pair, field, "site"))
    return latest(settings)


def with_site(flags: Sequence[Setting]) -> dict[str, Setting]:
    """Flags over the profile of the site. A flag replaces what it contradicts, and adds to lists of lines."""
    typed = latest(flags)
    name = typed["site"].values[-1] if "site" in typed else None
    site = {} if name == "" else dict(read_site(name))
    for group in (_SOFTWARE, _RANKS):
        if any(member in typed for member in group):
            site = {key: setting for key, setting in site.items() if key not in group}
    if any(member in typed for member in _RANKS) and "gres" in site and count_gres_gpus(site["gres"].values[-1]):
        del site["gres"]
    merged = {**site, **typed}
    for key in ("env", "sbatch"):
        if key in site and key in typed:
            where = f"{site[key].where} and {typed[key].where}"
            merged[key] = replace(typed[key], values=site[key].values + typed[key].values, where=where)
    return merged


def check_cluster(
    specs: Sequence[JobSpec], settings: Mapping[str, Setting], places: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Refuse a job that this cluster can never start. What Slurm does not answer is not checked."""
    facts = ask_slurm()
    where = {**places, **{name: setting.where for name, setting in settings.items()}}
    for spec in specs:
        request = as_sbatch_reads(spec, os.environ)
        require_possible(request, facts, where)
        if closed := describe_closed(request, facts):
            print(f"warning: {closed}", file=sys.stderr)


def complete(spec: JobSpec, loaded: LoadedConfig, flags: Sequence[Setting]) -> JobSpec:
    """The job with everything that follows from the recipe and from this machine."""
    work_dir = Path.cwd()
    threads = default_threads(loaded, has_gpus=bool(spec.gpus))
    mounts = [work_dir]
    data_dir = loaded.config.data.data_dir
    data = () if is_url(data_dir) else (Path(data_dir).absolute(),)  # a store needs no mount
    for path in (spec.folder, *data, *_folders_of_files(loaded)):
        if not any(path.is_relative_to(mounted) for mounted in mounts):
            mounts.append(path)
    has_own_python = any(getattr(spec, name) for name in _SOFTWARE)
    return replace(
        spec,
        name=loaded.recipe_name if spec.name == JobSpec.name else spec.name,
        work_dir=work_dir,
        train=_train_arguments(spec, loaded, flags),
        python="python" if has_own_python else sys.executable,
        cpus_per_task=spec.cpus_per_task or spec.default_cpus(threads),
        container_mounts=tuple(f"{path}:{path}" for path in mounts),
        venv=str(Path(spec.venv).expanduser().absolute()) if spec.venv else "",
    )


def _folders_of_files(loaded: LoadedConfig) -> list[Path]:
    """The folders of all files that the request names: recipe, functions, and weights to start from."""
    config = loaded.config
    files = [loaded.recipe_path, *(item.path for item in code_references(config) if item.is_file)]
    folders = [path.absolute().parent for path in files if path.absolute().parent != RECIPES]
    for text in (config.model.weights, config.run.init_from, config.run.resume):
        if text and Path(text).exists():
            path = Path(text).absolute()
            folders.append(path if path.is_dir() else path.parent)
    return folders


def _train_arguments(spec: JobSpec, loaded: LoadedConfig, flags: Sequence[Setting]) -> tuple[str, ...]:
    """Recipe and flags. Those that would be wrong after a requeue are replaced."""
    is_shipped = shipped_recipes().get(loaded.recipe_path.stem) == loaded.recipe_path
    arguments = [loaded.recipe_path.stem if is_shipped else str(loaded.recipe_path.absolute())]
    for setting in flags:
        if setting.field.name not in _SET_BY_SCRIPT:
            arguments += setting.tokens()
    run = loaded.config.run
    if run.load_policy != "fresh":
        # After a requeue, a run continues from its own checkpoints.
        keeps = run.load_policy == "eager" and run.resume == "auto"
        arguments.append(f"--load-policy={'eager' if keeps else 'fresh'}")
    if run.best_is_latest:
        arguments.append("--no-best-is-latest")
    if loaded.origin("processes") == "file" and spec.start != "agent":
        arguments.append("--processes=0")  # the tasks decide, not the recipe
    if loaded.recipe_path.name == RESOLVED and code_references(loaded.config):
        arguments.append(TRUST_FLAG)  # checked here; a node may not have the key of this machine
    return tuple(arguments)
