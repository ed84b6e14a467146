"""Site profiles: flags of `paceline submit slurm` under a name in a file.

A profile holds flags that a user would otherwise type every day (account, partition, modules). The file is
`~/.config/paceline/sites.yaml`, or the one that $PACELINE_SITES names:

    default:              # used when no --site is given
      account: proj42
      partition: gpu
      modules: [cuda/12.4]
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import UserError
from paceline.launch.job import SlurmFlags
from paceline.settings.declare import fields_of
from paceline.settings.values import Setting, find_in, latest, unknown_name
from paceline.settings.yaml_settings import Pair, pairs_of, read_pairs, setting_of

SITES_VARIABLE = "PACELINE_SITES"
DEFAULT_SITE = "default"


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


def _read_profile(profile: Pair, path: Path) -> dict[str, Setting]:
    known = {name: field for name, field in fields_of(SlurmFlags).items() if field.arg.in_site}
    settings = []
    for pair in pairs_of(profile.node, path, f"site {profile.key!r}", hint=_example()):
        field = find_in(known, pair.key)
        if field is None:
            raise unknown_name(pair.key, pair.where, known, "submit slurm")
        settings.append(setting_of(pair, field, "site"))
    return latest(settings)
