"""Combines defaults, recipe and flags with one parser, and records the origin of each value."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import threading
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from paceline.errors import UserError
from paceline.settings.fields import FieldSpec, field_table, find_field, flatten
from paceline.settings.recipe_file import (
    Setting,
    as_typed,
    default_line,
    find_recipe,
    read_recipe,
    setting_line,
    unknown_name,
)
from paceline.settings.schema import Config
from paceline.settings.text import check_text

_TYRO_STYLE = (tyro.conf.OmitArgPrefixes,)
_ONE_PARSE = threading.Lock()  # tyro keeps caches in global variables while it parses


@dataclass(frozen=True)
class LoadedConfig:
    """A resolved config, its recipe, and the origin of each value."""

    recipe_name: str
    recipe_path: Path
    config: Config
    settings: dict[str, Setting]  # the effective setting of each field that is not at its default

    def origin(self, name: str) -> str:
        """default, file or flag."""
        return self.settings[name].kind if name in self.settings else "default"

    def where(self, name: str) -> str:
        """The file and line, or the flag, that set a field."""
        setting = self.settings.get(name)
        return setting.where if setting else f"default of {find_field(name).flag}"  # type: ignore[union-attr]


def load_config(recipe: str, flags: list[str]) -> LoadedConfig:
    """Resolve a recipe and flags. `rules.py` checks ranges and rules between fields."""
    path = find_recipe(recipe)
    settings = read_recipe(path) + parse_flags(flags)
    return LoadedConfig(
        recipe_name=_recipe_name(path),
        recipe_path=path,
        config=_parse(settings),
        settings={setting.field.name: setting for setting in settings},
    )


def load_saved(values: dict[str, Any], where: Path, flags: list[str]) -> LoadedConfig:
    """Like `load_config`, from the flat config in a checkpoint. Settings unknown to this release are left out."""
    fields = {name: field for name in values if (field := field_table().get(name)) is not None}
    saved = [Setting(field, as_typed(values[name]), "file", f"{where}, {name}") for name, field in fields.items()]
    for setting in saved:
        for value in setting.values:
            check_text(value, setting.field.name, where=setting.where)
    settings = saved + parse_flags(flags)
    winners = {setting.field.name: setting for setting in settings}
    return LoadedConfig(_recipe_name(where), where, _parse(settings), winners)


def parse_flags(arguments: list[str]) -> list[Setting]:
    """Split command-line arguments into settings. The parser checks the values later."""
    settings = []
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            raise UserError(f"unexpected argument {token!r}", hint="flags start with --; one recipe comes first")
        name, has_value, value = token.removeprefix("--").partition("=")
        negated = find_field(name.removeprefix("no-")) if name.startswith("no-") else None
        field = find_field(name) or (negated if negated and negated.is_bool else None)
        if field is None:
            raise unknown_name(token.partition("=")[0], "the command line")
        if field.is_bool:
            if has_value:
                raise UserError(f"{field.flag} takes no value", got=token, hint=f"{field.flag} or --no-{name}")
            values = ["false" if field is negated else "true"]
        elif has_value:
            values = [value]
        else:
            values = _take_values(field, rest)
        for value in values:
            check_text(value, field.name, where=f"flag {field.flag}")
        settings.append(Setting(field, tuple(values), "flag", f"flag {field.flag}"))
    return settings


def _take_values(field: FieldSpec, rest: list[str]) -> list[str]:
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (field.is_tuple or not values):
        values.append(rest.pop(0))
    if not values and not field.is_tuple:
        raise UserError(f"{field.flag} needs a value", where="the command line", allowed=field.expects)
    return values


def _parse(settings: list[Setting]) -> Config:
    """Pass everything to tyro at once. Only if it refuses, find the wrong setting."""
    latest = list({setting.field.name: setting for setting in settings}.values())
    config = _build(latest)
    if config is not None:
        return config
    # Find the first refused setting by bisection: a parse is slow, and a recipe has many settings.
    counts = range(1, len(latest))
    refused = latest[bisect.bisect_left(counts, True, key=lambda count: _build(latest[:count]) is None)]
    raise UserError(
        f"{refused.field.name}: {' '.join(refused.values)!r} is not valid",
        where=refused.where,
        allowed=refused.field.expects,
    )


def _build(settings: list[Setting]) -> Config | None:
    """Text is used unchanged; tyro parses everything else. None if it refuses a value."""
    texts = [setting for setting in settings if setting.field.is_text]
    others = [setting for setting in settings if not setting.field.is_text]
    # In a list, tyro would read a value that begins with dashes as the next flag.
    if any(setting.field.is_tuple and not set(setting.values) <= set(setting.field.choices) for setting in others):
        return None
    config = _tyro(others) if all(map(_is_number_if_needed, others)) else None
    if config is None:
        return None
    for setting in texts:
        value = setting.values if setting.field.is_tuple else setting.values[-1]
        group = dataclasses.replace(getattr(config, setting.field.group), **{setting.field.name: value})
        config = dataclasses.replace(config, **{setting.field.group: group})
    return config


def _is_number_if_needed(setting: Setting) -> bool:
    """tyro prints on standard error what is no number, whatever it is told about its output."""
    if setting.field.type in (int, float):
        try:
            setting.field.type(setting.values[-1])
        except ValueError:
            return False
    return True


def _tyro(settings: list[Setting]) -> Config | None:
    tokens = [token for setting in settings for token in setting.tokens()]
    with _ONE_PARSE:
        try:
            return tyro.cli(Config, args=tokens, config=_TYRO_STYLE, console_outputs=False)
        except SystemExit:
            return None


def print_help(prog: str, description: str) -> None:
    """Every flag with its default, grouped."""
    with contextlib.suppress(SystemExit):
        tyro.cli(Config, args=["--help"], prog=prog, description=description, config=_TYRO_STYLE)


def to_yaml(config: Config, chosen: Container[str] | None = None) -> str:
    """The resolved config as a recipe that gives the same run.

    `chosen` names the settings that are not defaults; without it, all count as chosen. A default is written with its
    value, so a release with another default gives the same run, and with a mark, so it still counts as a default.
    """
    lines: list[str] = []
    group = ""
    for name, value in flatten(config).items():
        if field_table()[name].group != group:
            group = field_table()[name].group
            lines.append(f"\n# {group}" if lines else f"# {group}")
        is_default = chosen is not None and name not in chosen and value == field_table()[name].default
        lines.append(default_line(field_table()[name]) if is_default else setting_line(name, value))
    return "\n".join(lines) + "\n"


def _recipe_name(path: Path) -> str:
    """For a run's resolved config.yaml, the name of that run's recipe instead of "config"."""
    name = path.resolve().parent.name if path.name == "config.yaml" else path.stem
    return check_text(name, "the name of the recipe", where=str(path))
