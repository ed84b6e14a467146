"""Finds recipe files, reads them as settings with their lines, and writes settings as lines of a recipe."""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path

from paceline.errors import UserError
from paceline.settings.declare import FieldSpec
from paceline.settings.fields import field_table, find_field
from paceline.settings.text import check_text
from paceline.settings.values import RENAMED, Setting, unknown_name
from paceline.settings.yaml_settings import read_pairs, setting_of

DEFAULT_RECIPE = "shapes-cnn"
RECIPES = Path(__file__).resolve().parent.parent / "recipes"
RESOLVED = "config.yaml"  # the resolved config in a run folder


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
