"""Combines defaults, recipe and other sources into one config, and records the origin of each value."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.settings.command_line import parse_arguments
from paceline.settings.recipe_file import RESOLVED, default_line, find_recipe, read_recipe, setting_line
from paceline.settings.samples import read_excluded, read_relabelled
from paceline.settings.schema import Config, field_table, flatten
from paceline.settings.text import check_text
from paceline.settings.values import RENAMED, Setting, as_typed, build, check_texts, latest


@dataclass(frozen=True)
class LoadedConfig:
    """A resolved config, its recipe, and the origin of each value."""

    recipe_name: str
    recipe_path: Path
    config: Config
    settings: dict[str, Setting]  # the effective setting of each field that is not at its default

    def origin(self, name: str) -> str:
        """default, file (the recipe) or flag (the command line, or a caller in its place)."""
        return self.settings[name].kind if name in self.settings else "default"

    def where(self, name: str) -> str:
        """The file and line, the flag, or the other place that set a field."""
        setting = self.settings.get(name)
        return setting.where if setting else f"default of {field_table()[name].flag}"


def load_config(recipe: str, flags: Sequence[str | Setting] = ()) -> LoadedConfig:
    """Resolve a recipe and flags, as arguments or as settings. `rules.py` checks rules between fields."""
    path = find_recipe(recipe)
    return _resolve(path, [*read_recipe(path), *parse_flags(flags)])


def load_saved(values: dict[str, Any], where: Path, flags: Sequence[str | Setting] = ()) -> LoadedConfig:
    """Like `load_config`, from the flat config in a checkpoint. Settings unknown to this release are left out."""
    named = {RENAMED.get(name, name): (name, value) for name, value in values.items()}
    saved = [
        check_texts(Setting(field, as_typed(named[name][1]), "file", f"{where}, {named[name][0]}"))
        for name, field in field_table().items()
        if name in named
    ]
    return _resolve(where, [*saved, *parse_flags(flags)])


def parse_flags(flags: Sequence[str | Setting]) -> list[Setting]:
    """Flags of `paceline train` as settings. Settings stay as they are."""
    given = [flag for flag in flags if isinstance(flag, Setting)]
    arguments = [flag for flag in flags if not isinstance(flag, Setting)]
    return [*given, *parse_arguments(arguments, field_table(), "train")]


def _resolve(path: Path, settings: list[Setting]) -> LoadedConfig:
    loaded = LoadedConfig(_recipe_name(path), path, build(Config, settings), latest(settings))
    data = loaded.config.data
    if not (data.exclude or data.relabel):
        return loaded
    exclude = read_excluded(data.exclude, loaded.where("exclude"))
    relabel = read_relabelled(data.relabel, loaded.where("relabel"))
    return replace(loaded, config=replace(loaded.config, data=replace(data, exclude=exclude, relabel=relabel)))


def _recipe_name(path: Path) -> str:
    """For a run's resolved config, the name of that run's recipe instead of "config"."""
    name = path.resolve().parent.name if path.name == RESOLVED else path.stem
    return check_text(name, "the name of the recipe", where=str(path))


def to_yaml(config: Config, chosen: Container[str] | None = None) -> str:
    """The resolved config as a recipe that gives the same run.

    `chosen` names the settings that are not defaults; without it, all count as chosen. A default is written with its
    value, so a release with another default gives the same run, and with a mark, so it still counts as a default.
    """
    lines: list[str] = []
    group = ""
    for name, value in flatten(config).items():
        field = field_table()[name]
        if field.group != group:
            group = field.group
            lines.append(f"\n# {group}" if lines else f"# {group}")
        is_default = chosen is not None and name not in chosen and value == field.default
        lines.append(default_line(field) if is_default else setting_line(name, value))
    return "\n".join(lines) + "\n"
