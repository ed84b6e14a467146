"""Finds recipe files, and reads YAML into settings with their line numbers.

The YAML is composed, not constructed: every scalar stays the text in the file. `3e-4` does not become a
string and `no` does not become a boolean, and the parser of the flags also parses the files.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from paceline.errors import UserError
from paceline.settings.fields import FieldSpec, field_table, find_field
from paceline.settings.small_files import YamlError, compose_yaml
from paceline.settings.text import check_text

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


@dataclass(frozen=True)
class Setting:
    """One given value, and its place."""

    field: FieldSpec
    values: tuple[str, ...]
    kind: str  # "file" or "flag"
    where: str

    def tokens(self) -> list[str]:
        """As command-line arguments for the parser."""
        if self.field.is_bool:
            name = self.field.name.replace("_", "-")
            return [f"--{name}" if self.values == ("true",) else f"--no-{name}"]
        if self.field.is_tuple and not (self.field.is_text and len(self.values) == 1):
            return [self.field.flag, *self.values]
        return [f"{self.field.flag}={value}" for value in self.values]


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(RECIPES.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """The file of a shipped recipe's name or of a path."""
    check_text(name, "the name of the recipe")
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:  # longer than a file system allows
        raise UserError("the name of the recipe cannot be a path", got=f"{name[:80]}: {error.strerror}") from error
    if is_file:
        return path
    if is_folder:
        raise UserError("a recipe must be a YAML file, not a folder", got=name)
    close = difflib.get_close_matches(name, shipped, n=1, cutoff=0.5)
    raise UserError(
        f"there is no recipe {name!r}",
        allowed=f"a path to a YAML file, or one of: {', '.join(shipped)}",
        hint=f"paceline train {close[0]}" if close else None,
    )


def read_recipe(path: Path) -> list[Setting]:
    """The settings of a recipe file, in its order."""
    try:
        root = compose_yaml(path)
    except YamlError as error:
        hint = "indent with spaces; YAML allows no tabs" if "\\t" in error.problem else None
        raise UserError(f"the recipe is not valid YAML: {error}", where=error.place(path), hint=hint) from error
    except OSError as error:
        raise UserError("the recipe cannot be read", where=str(path), got=error.strerror) from error
    if root is None:
        raise UserError("the recipe is empty", where=str(path), allowed="one `key: value` per line")
    if not isinstance(root, yaml.MappingNode):
        got = "a list" if isinstance(root, yaml.SequenceNode) else "one value"
        raise UserError("a recipe must be `key: value` lines", where=str(path), got=got)
    return list(_settings(root, path))


def _settings(root: yaml.MappingNode, path: Path) -> Iterator[Setting]:
    seen: dict[str, int] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        where = f"{path}, line {line}"
        key = str(key_node.value)[:200]  # a list or a mapping as a key is unknown, too
        field = find_field(key)
        if field is None:
            raise unknown_name(key, where)
        if field.name in seen:
            raise UserError(f"{field.name} is given twice", where=f"{where} and line {seen[field.name]}")
        seen[field.name] = line
        if _line_of(key_node) == default_line(field):
            continue  # a marked default of a resolved config
        yield Setting(field, _values(field, value_node, where), "file", where)


def _values(field: FieldSpec, node: yaml.Node, where: str) -> tuple[str, ...]:
    if isinstance(node, yaml.SequenceNode) and field.is_tuple:
        return tuple(_scalar(field, item, where) for item in node.value)
    text = _scalar(field, node, where)
    if field.is_bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{field.name}: {text!r} is not valid", where=where, allowed=field.expects)
        return (text.lower(),)
    return (text,)


def _scalar(field: FieldSpec, node: yaml.Node, where: str) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
        found = "nothing" if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
        raise UserError(f"{field.name} needs a value", where=where, got=found, allowed=field.expects)
    return check_text(str(node.value), field.name, where=where)


def _line_of(node: yaml.Node) -> str:
    """The line of the file that begins with this key, with its comment."""
    mark = node.start_mark
    return str(mark.buffer)[mark.pointer :].partition("\n")[0].rstrip()


def as_typed(value: object) -> tuple[str, ...]:
    """A value as on the command line."""
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in items)


def setting_line(name: str, value: object) -> str:
    """A setting as a line of a recipe."""
    return f"{name}: {_written(value)}"


def default_line(field: FieldSpec) -> str:
    """A default in a resolved config. Only exactly this line is read as a default; another value is a chosen one."""
    return f"{setting_line(field.name, field.default)}  # default"


def _written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, str):
        return _quoted(value)
    return repr(value)


def _quoted(text: str) -> str:
    """Printable text in single quotes, with quotes doubled. Text with other characters is escaped."""
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'


def unknown_name(key: str, where: str) -> UserError:
    """The error for an unknown key or flag, with the most similar known one."""
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
