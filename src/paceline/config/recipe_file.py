"""Recipe files: finding them, and reading YAML into settings that remember their line.

The YAML is composed, not constructed: every scalar stays the text the user typed. So `3e-4` is not
mistaken for a string nor `no` for a boolean, and the same validator that reads flags reads files.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from paceline.config.fields import FieldSpec, field_table, find_field
from paceline.errors import UserError

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
LARGEST_RECIPE_BYTES = 1_000_000


@dataclass(frozen=True)
class Setting:
    """One value somebody gave, and where."""

    field: FieldSpec
    values: tuple[str, ...]
    kind: str  # "file" or "flag"
    where: str

    def tokens(self) -> list[str]:
        """As command-line arguments for the parser."""
        if self.field.is_bool:
            name = self.field.name.replace("_", "-")
            return [f"--{name}" if self.values == ("true",) else f"--no-{name}"]
        if self.field.is_tuple:
            return [self.field.flag, *self.values]
        return [f"{self.field.flag}={value}" for value in self.values]


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """The file behind a shipped recipe's name or a path."""
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        raise UserError("a recipe must be a YAML file, not a folder", got=name)
    close = difflib.get_close_matches(name, shipped, n=1, cutoff=0.5)
    raise UserError(
        f"there is no recipe {name!r}",
        allowed=f"a path to a YAML file, or one of: {', '.join(shipped)}",
        hint=f"paceline train {close[0]}" if close else None,
    )


def read_recipe(path: Path) -> list[Setting]:
    """The settings of a recipe file, in its order."""
    if path.stat().st_size > LARGEST_RECIPE_BYTES:
        raise UserError("this file is too large to be a recipe", where=str(path), allowed="up to 1 MB")
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise UserError("the recipe is not UTF-8 text", where=f"{path}, byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        hint = "indent with spaces; YAML allows no tabs" if "\\t" in str(error.problem) else None
        problem = error.problem or "the file cannot be read as YAML"
        raise UserError(f"the recipe is not valid YAML: {problem}", where=f"{path}{line}", hint=hint) from error
    except yaml.YAMLError as error:  # a control character, for one
        raise UserError(f"the recipe is not valid YAML: {str(error).splitlines()[0]}", where=str(path)) from error
    if root is None:
        raise UserError("the recipe is empty", where=str(path), allowed="one `key: value` per line")
    if not isinstance(root, yaml.MappingNode):
        raise UserError("a recipe must be `key: value` lines", where=str(path), got=f"a {root.id}")
    return list(_settings(root, path))


def _settings(root: yaml.MappingNode, path: Path) -> Iterator[Setting]:
    seen: dict[str, int] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        where = f"{path}, line {line}"
        key = str(key_node.value)
        field = find_field(key)
        if field is None:
            raise unknown_name(key, where)
        if field.name in seen:
            raise UserError(f"{field.name} is given twice", where=f"{where} and line {seen[field.name]}")
        seen[field.name] = line
        yield Setting(field, _values(field, value_node, where), "file", where)


def _values(field: FieldSpec, node: yaml.Node, where: str) -> tuple[str, ...]:
    if isinstance(node, yaml.SequenceNode) and field.is_tuple:
        return tuple(str(item.value) for item in node.value)
    if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
        found = "nothing" if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
        raise UserError(f"{field.name} needs a value", where=where, got=found, allowed=field.expects)
    text = str(node.value)
    if field.is_bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{field.name}: {text!r} is not valid", where=where, allowed=field.expects)
        return (text.lower(),)
    return (text,)


def unknown_name(key: str, where: str) -> UserError:
    """The error for a key or flag nobody knows, with the nearest one that exists."""
    names = [*field_table(), *(alias for spec in field_table().values() for alias in spec.aliases)]
    name = key.lstrip("-").replace("-", "_")
    # "batch_size" should find "global_batch_size" although half of its letters are missing.
    close = (
        difflib.get_close_matches(name, names, n=1, cutoff=0.85)
        or [n for n in names if name in n]
        or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    )
    is_flag = key.startswith("-")
    if not close:
        hint = "paceline train --help lists them all"
    else:
        hint = "perhaps you meant " + ("--" + close[0].replace("_", "-") if is_flag else close[0])
    return UserError(f"unknown {'flag' if is_flag else 'key'} {key!r}", where=where, hint=hint)
