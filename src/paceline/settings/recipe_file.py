"""Reads the `key: value` lines of YAML files as settings, finds recipes, and writes settings as lines of a recipe.

Recipes, site profiles and parameters of Runnable are read here. The YAML is composed, not constructed: every scalar
stays the text in the file. `3e-4` does not become a string and `no` does not become a boolean, because only the type
of the field decides.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UserError
from paceline.settings.declare import FieldSpec
from paceline.settings.schema import field_table, find_field
from paceline.settings.small_files import YamlError, compose_yaml
from paceline.settings.text import check_text
from paceline.settings.values import RENAMED, Origin, Setting, check_texts, split_commas, unknown_name

if TYPE_CHECKING:
    import yaml


_NULL = "tag:yaml.org,2002:null"
DEFAULT_RECIPE = "shapes-cnn"
RECIPES = Path(__file__).resolve().parent.parent / "recipes"
RESOLVED = "config.yaml"  # the resolved config in a run folder


@dataclass(frozen=True)
class KeyValue:
    """One key of a mapping, its value, and their place."""

    key: str
    node: yaml.Node
    where: str
    line: int
    text: str  # the line of the file from the key on, with its comment


def read_pairs(path: Path, what: str, hint: str | None = None) -> list[KeyValue] | None:
    """The keys of a file, in its order; None for an empty file. `what` names it, for example "the recipe"."""
    try:
        root = compose_yaml(path)
    except YamlError as error:
        hint = "indent with spaces; YAML allows no tabs" if "\\t" in error.problem else None
        raise UserError(f"{what} is not valid YAML: {error}", where=error.place(path), hint=hint) from error
    except OSError as error:
        raise UserError(f"{what} cannot be read", where=str(path), got=error.strerror) from error
    return None if root is None else list(pairs_of(root, path, what, hint))


def pairs_of(node: yaml.Node, path: Path, what: str, hint: str | None = None) -> Iterator[KeyValue]:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        got = "a list" if isinstance(node, yaml.SequenceNode) else "one value"
        where = f"{path}, line {node.start_mark.line + 1}"
        raise UserError(f"{what} must be `key: value` lines", where=where, got=got, hint=hint)
    for key, value in node.value:
        mark = key.start_mark
        text = str(mark.buffer)[mark.pointer :].partition("\n")[0].rstrip()
        name = str(key.value)[:200]  # a list or a mapping as a key is an unknown key
        yield KeyValue(name, value, f"{path}, line {mark.line + 1}", mark.line + 1, text)


def setting_of(pair: KeyValue, field: FieldSpec, kind: Origin) -> Setting:
    """The value of a pair as text; `values.py` converts it."""
    return check_texts(Setting(field, _values(field, pair), kind, pair.where))


def _values(field: FieldSpec, pair: KeyValue) -> tuple[str, ...]:
    import yaml

    node = pair.node
    if isinstance(node, yaml.SequenceNode) and field.is_tuple:
        return tuple(_scalar(field, item, pair.where) for item in node.value)
    is_mapping = field.arg.is_mapping or field.arg.many == "lines"
    if isinstance(node, yaml.MappingNode) and field.is_tuple and is_mapping:
        entries = [[_scalar(field, part, pair.where) for part in entry] for entry in node.value]
        return tuple(f"{name}={value}" for name, value in entries)
    text = _scalar(field, node, pair.where)
    if field.is_tuple and field.arg.many == "commas":
        return tuple(split_commas(text))
    return (text.lower() if field.is_bool else text,)


def _scalar(field: FieldSpec, node: yaml.Node, where: str) -> str:
    import yaml

    if not isinstance(node, yaml.ScalarNode) or node.tag == _NULL:
        found = "nothing" if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
        raise UserError(f"{field.name} needs a value", where=where, got=found, allowed=field.expects)
    return str(node.value)


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
    if is_file and path.suffix == ".py":
        hint = f"paceline train shapes-cnn --model-name {shlex.quote(name)}:FUNCTION"
        raise UserError("a recipe must be a YAML file, and this is Python", got=name, hint=hint)
    if is_file:
        return path
    if is_folder:
        resolved = path / RESOLVED
        hint = f"to continue this run: paceline train {shlex.quote(str(resolved))} --resume auto"
        raise UserError(
            "a recipe must be a YAML file, not a folder", got=name, hint=hint if resolved.is_file() else None
        )
    close = difflib.get_close_matches(name, shipped, n=1, cutoff=0.5)
    raise UserError(
        f"there is no recipe {name!r}",
        allowed=f"a path to a YAML file, or one of: {', '.join(shipped)}",
        hint=f"paceline train {close[0]}" if close else None,
    )


def read_recipe(path: Path) -> list[Setting]:
    """The settings of a recipe file, in its order. Marked defaults of a resolved config are left out."""
    pairs = read_pairs(path, "the recipe")
    if pairs is None:
        raise UserError("the recipe is empty", where=str(path), allowed="one `key: value` per line")
    settings: list[Setting] = []
    seen: dict[str, int] = {}
    for pair in pairs:
        # A run of an earlier release stays readable; a recipe has to use the new name.
        name = RENAMED.get(pair.key, pair.key) if path.name == RESOLVED else pair.key
        field = find_field(name)
        if field is None:
            raise unknown_name(pair.key, pair.where, field_table())
        if field.name in seen:
            raise UserError(f"{field.name} is given twice", where=f"{pair.where} and line {seen[field.name]}")
        seen[field.name] = pair.line
        if pair.text != default_line(field, pair.key):
            settings.append(setting_of(pair, field, "file"))
    return settings


def setting_line(name: str, value: object) -> str:
    """A setting as a line of a recipe."""
    return f"{name}: {_written(value)}"


def default_line(field: FieldSpec, key: str = "") -> str:
    """A default in a resolved config. Only exactly this line is read as a default; another value is a chosen one."""
    return f"{setting_line(key or field.name, field.default)}  # default"


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
