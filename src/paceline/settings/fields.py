"""The table of the settings of a run: one row per field, found by flag, recipe key or alias."""

from __future__ import annotations

from typing import Any

from paceline.settings.declare import FieldSpec, fields_of
from paceline.settings.schema import Config
from paceline.settings.values import find_in


def field_table() -> dict[str, FieldSpec]:
    """Every field by name, in the order of `--help`."""
    return fields_of(Config)


def find_field(key: str) -> FieldSpec | None:
    """The field of this recipe key, flag (without dashes) or alias."""
    return find_in(field_table(), key)


def flatten(config: Config) -> dict[str, Any]:
    """Every value of a config by field name, in the order of `--help`."""
    return {name: spec.value_in(config) for name, spec in field_table().items()}
