"""Arguments of a model as text: `depth=6 drop_path=0.1`. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import UserError

# Follow from the data, or have a setting of their own.
_OWN = ("num_classes", "input_shape", "in_chans", "pretrained", "weights")
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def parse_model_args(texts: Sequence[str], where: str = "--model-args") -> dict[str, Any]:
    """The arguments by name. Numbers, true, false, none, quoted text and JSON lists are converted."""
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(
                "a model argument is not KEY=VALUE", where=where, got=text, allowed="for example depth=6 drop_path=0.1"
            )
        if name in arguments or name in _OWN:
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
