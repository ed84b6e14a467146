"""Reads the `key: value` lines of a YAML file as settings: recipes, site profiles and parameters of Runnable.

The YAML is composed, not constructed: every scalar stays the text in the file. `3e-4` does not become a string and
`no` does not become a boolean, because only the type of the field decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import UserError
from paceline.settings.declare import FieldSpec
from paceline.settings.small_files import YamlError, compose_yaml
from paceline.settings.values import Origin, Setting, check_texts, split_commas

if TYPE_CHECKING:
    import yaml

_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class Pair:
    """One key of a mapping, its value, and their place."""

    key: str
    node: yaml.Node
    where: str
    line: int
    text: str  # the line of the file from the key on, with its comment


def read_pairs(path: Path, what: str, hint: str | None = None) -> list[Pair] | None:
    """The keys of a file, in its order; None for an empty file. `what` names it, for example "the recipe"."""
    try:
        root = compose_yaml(path)
    except YamlError as error:
        hint = "indent with spaces; YAML allows no tabs" if "\\t" in error.problem else None
        raise UserError(f"{what} is not valid YAML: {error}", where=error.place(path), hint=hint) from error
    except OSError as error:
        raise UserError(f"{what} cannot be read", where=str(path), got=error.strerror) from error
    return None if root is None else list(pairs_of(root, path, what, hint))


def pairs_of(node: yaml.Node, path: Path, what: str, hint: str | None = None) -> Iterator[Pair]:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        got = "a list" if isinstance(node, yaml.SequenceNode) else "one value"
        where = f"{path}, line {node.start_mark.line + 1}"
        raise UserError(f"{what} must be `key: value` lines", where=where, got=got, hint=hint)
    for key, value in node.value:
        mark = key.start_mark
        text = str(mark.buffer)[mark.pointer :].partition("\n")[0].rstrip()
        name = str(key.value)[:200]  # a list or a mapping as a key is an unknown key
        yield Pair(name, value, f"{path}, line {mark.line + 1}", mark.line + 1, text)


def setting_of(pair: Pair, field: FieldSpec, kind: Origin) -> Setting:
    """The value of a pair as text; `values.py` converts it."""
    return check_texts(Setting(field, _values(field, pair), kind, pair.where))


def _values(field: FieldSpec, pair: Pair) -> tuple[str, ...]:
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
