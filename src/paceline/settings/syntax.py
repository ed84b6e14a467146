"""Settings whose text has a syntax: `--processes`, `--model-args`, and functions such as `FILE.py:FUNCTION`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.settings.schema import Config, field_table

_MOST_PROCESSES = 1024
# Follow from the data, or have a setting of their own.
_RESERVED_ARGS = ("num_classes", "input_shape", "in_chans", "pretrained", "weights")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
# Fields whose value may name a function. timm and torchvision are not the user's code.
CODE_FIELDS = ("dataset", "model_name", "loss", "metrics")
_COLLECTIONS = ("timm", "torchvision")


@dataclass(frozen=True)
class ProcessRange:
    """0 to 0 means: as many as fit on this machine."""

    low: int
    high: int

    @property
    def is_open(self) -> bool:
        """Whether the machine decides."""
        return self.high == 0

    def holds(self, number: int) -> bool:
        return self.is_open or self.low <= number <= self.high


def parse_processes(text: str, where: str = "flag --processes") -> ProcessRange:
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text.strip())
    low = int(match[1]) if match else -1
    high = int(match[2]) if match and match[2] is not None else low
    is_range = match is not None and match[2] is not None
    if match is None or high > _MOST_PROCESSES or (is_range and not 1 <= low <= high):
        raise UserError(
            f"processes: {text!r} is not valid",
            where=where,
            allowed=f"a whole number from 0 up to {_MOST_PROCESSES}, or MIN:MAX such as 2:4",
        )
    return ProcessRange(low, high)


def parse_model_args(texts: Sequence[str], where: str = "--model-args") -> dict[str, Any]:
    """The arguments by name. Numbers, true, false, none, quoted text and JSON lists are converted."""
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(
                "a model argument is not KEY=VALUE", where=where, got=text, allowed="for example depth=6 drop_path=0.1"
            )
        if name in arguments or name in _RESERVED_ARGS:
            what = "is given twice" if name in arguments else "follows from the data or has its own flag"
            raise UserError(f"model argument {name} {what}", where=where, got=text, hint=f"leave {name} out")
        arguments[name] = _value(value)
    return arguments


def write_model_args(arguments: Mapping[str, Any], where: str) -> list[str]:
    """The same arguments as text."""
    texts = []
    for name, value in arguments.items():
        try:
            texts.append(f"{name}={json.dumps(value, allow_nan=False)}")
        except (TypeError, ValueError) as error:
            raise UserError(
                f"model argument {name} cannot be written down with the run",
                where=where,
                got=f"a value of type {type(value).__name__}",
                allowed="numbers, text, True, False, None, and lists of them",
            ) from error
    return texts


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


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
