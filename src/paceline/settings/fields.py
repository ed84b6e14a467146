"""The schema as a table: one row per field, found by flag, recipe key or alias."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from paceline.settings.schema import Config, Range


@dataclass(frozen=True)
class FieldSpec:
    """One field of the schema."""

    name: str
    group: str
    type: Any
    default: object
    range: Range | None
    aliases: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        return self.type is bool

    @property
    def is_tuple(self) -> bool:
        return get_origin(self.type) is tuple

    @property
    def is_text(self) -> bool:
        """Free text, or a list of it: nothing to parse."""
        return (get_args(self.type)[0] if self.is_tuple else self.type) is str

    @property
    def choices(self) -> tuple[str, ...]:
        inner = get_args(self.type)[0] if self.is_tuple else self.type
        return tuple(map(str, get_args(inner))) if get_origin(inner) is Literal else ()

    @property
    def expects(self) -> str:
        """The allowed values, as text."""
        if self.choices:
            return ("any of " if self.is_tuple else "one of ") + ", ".join(self.choices)
        kind = {bool: "true or false", int: "a whole number", float: "a number"}.get(self.type, "text")
        return f"{kind}, {self.range}" if self.range else kind

    def value_in(self, config: Config) -> Any:
        return getattr(getattr(config, self.group), self.name)


@cache
def field_table() -> dict[str, FieldSpec]:
    """Every field by name, in the order of `--help`."""
    table: dict[str, FieldSpec] = {}
    groups = typing.get_type_hints(Config)
    for group_name, group in groups.items():
        hints = typing.get_type_hints(group, include_extras=True)
        for item in dataclasses.fields(group):
            hint = hints[item.name]
            metadata = getattr(hint, "__metadata__", ())
            spec = FieldSpec(
                name=item.name,
                group=group_name,
                type=get_args(hint)[0] if metadata else hint,
                default=item.default,
                range=next((entry for entry in metadata if isinstance(entry, Range)), None),
                aliases=tuple(
                    alias.removeprefix("--").replace("-", "_")
                    for entry in metadata
                    for alias in getattr(entry, "aliases", None) or ()
                ),
            )
            if spec.name in table:
                raise TypeError(f"two groups of the schema have a field named {spec.name}")
            table[spec.name] = spec
    return table


def find_field(key: str) -> FieldSpec | None:
    """The field of this recipe key, flag (without dashes) or alias."""
    name = key.replace("-", "_")
    table = field_table()
    if name in table:
        return table[name]
    return next((spec for spec in table.values() if name in spec.aliases), None)


def flatten(config: Config) -> dict[str, Any]:
    """Every value of a config by field name, in the order of `--help`."""
    return {name: spec.value_in(config) for name, spec in field_table().items()}
