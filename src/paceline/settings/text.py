"""Checks text from outside: recipe values, flags, names, folders, variables, site files, notes.

Such text is written to job scripts, manifests, JSON, YAML and terminals. A newline would begin another line of a
script, and a control character would change what a terminal shows. Both are refused before anything is written.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from typing import Any

from paceline.errors import UserError, printable_line

# Embeddings, overrides and isolates: they change the order in which a line is shown.
_BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_REFUSED_CATEGORIES = {
    "Cc": "a control character",
    "Zl": "a line separator",
    "Zp": "a paragraph separator",
    "Cs": "a byte that is not UTF-8",
}
_NAMES = {"\n": "a newline", "\r": "a carriage return", "\t": "a tab", "\0": "a NUL character"}


def check_text(
    text: str, what: str, *, where: str | None = None, hint: str | None = None, is_secret: bool = False
) -> str:
    """Return the text. UserError if it cannot be one line of a file or terminal."""
    fault = find_fault(text)
    if fault is None:
        return text
    raise UserError(
        f"{what} contains {fault}",
        where=where,
        got=None if is_secret else f"'{printable_line(text[:200])}'",
        allowed="text on one line, without control characters",
        hint=hint,
    )


def check_fields(record: Any, *, secret: tuple[str, ...] = (), exempt: tuple[str, ...] = ()) -> None:
    """Check every text in a dataclass, including its tuples and nested dataclasses."""
    for item in dataclasses.fields(record):
        if item.name not in exempt:
            _check_value(getattr(record, item.name), item.name, is_secret=item.name in secret)


def _check_value(value: object, name: str, *, is_secret: bool) -> None:
    if isinstance(value, str):
        check_text(value, name, is_secret=is_secret)
    elif isinstance(value, tuple):
        for part in value:
            _check_value(part, name, is_secret=is_secret)
    elif dataclasses.is_dataclass(value):
        check_fields(value)


def find_fault(text: str) -> str | None:
    """A description of the first refused character; None if the text is accepted."""
    if text.isascii() and text.isprintable():  # almost always
        return None
    for character in text:
        if character in _NAMES:
            return _NAMES[character]
        if character in _BIDIRECTIONAL:
            return "a bidirectional control character"
        name = _REFUSED_CATEGORIES.get(unicodedata.category(character))
        if name is not None:
            return name
    return None
