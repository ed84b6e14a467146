"""The functions that a config names: `FILE.py:FUNCTION` and `package.module:FUNCTION` in its fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.settings.fields import field_table
from paceline.settings.schema import Config

# Fields whose value may name a function. timm and torchvision are not the user's code.
CODE_FIELDS = ("dataset", "model_name", "loss", "metrics")
_COLLECTIONS = ("timm", "torchvision")


@dataclass(frozen=True)
class CodeReference:
    """One function that a config names."""

    field: str
    place: str  # a file or a module
    function: str

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py") or "/" in self.place

    @property
    def path(self) -> Path:
        return Path(self.place)

    @property
    def name(self) -> str:
        """The name without the folder: a file may be moved."""
        return f"{self.field}:{self.function}"

    def __str__(self) -> str:
        return f"{self.place}:{self.function}"


def code_references(config: Config) -> list[CodeReference]:
    """The user's own functions that the config names, in the order of the fields."""
    found = []
    for name in CODE_FIELDS:
        value = field_table()[name].value_in(config)
        for text in value if isinstance(value, tuple) else (value,):
            place, is_reference, function = text.rpartition(":")
            if is_reference and not (name == "model_name" and place in _COLLECTIONS):
                found.append(CodeReference(name, place, function))
    return found
