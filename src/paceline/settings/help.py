"""The `--help` text of a command, from its settings dataclass."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Collection, Iterable
from dataclasses import MISSING

from paceline.settings.command_line import usage
from paceline.settings.declare import FieldSpec, collected_by, fields_of, groups_of

_WIDEST, _NARROWEST = 118, 60
_FLAG_COLUMN = 30


def help_text(owner: type, command: str, *, without: Collection[type] = ()) -> str:
    """Usage, description and flags, also those that it collects for other dataclasses but `without`."""
    parts = [f"usage: {usage(owner, command)}", *described(owner)]
    own = [field for field in fields_of(owner).values() if field.help]
    own.sort(key=lambda field: field.arg.place == "flag")  # words first
    if own:
        parts.append("\n".join(line for field in own for line in _lines(field)))
    for other in collected_by(owner).values():
        if other in without:
            continue
        for group, text in groups_of(other).items():
            parts.append(f"{group}: {text}" if group else "flags of the job:")
            fields = [field for field in fields_of(other).values() if field.group == group]
            parts[-1] += "".join("\n" + line for field in fields for line in _lines(field))
    return "\n\n".join(parts) + "\n"


def described(owner: type) -> list[str]:
    """The docstring of a settings dataclass, paragraph by paragraph, wrapped. Indented lines stay as they are."""
    paragraphs = inspect.cleandoc(owner.__doc__ or "").split("\n\n")
    return [text if "\n " in text or text.startswith(" ") else _wrapped(text) for text in paragraphs]


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _width(), break_on_hyphens=False, break_long_words=False))


def _lines(field: FieldSpec) -> Iterable[str]:
    name = f"  {_name(field)}"
    choices = f" Choices: {', '.join(field.choices)}." if field.choices and field.arg.shown else ""
    text = textwrap.wrap(field.help + choices + _default(field), _width() - _FLAG_COLUMN, break_on_hyphens=False)
    if len(name) >= _FLAG_COLUMN:
        yield name
        name = ""
    for number, line in enumerate(text):
        yield f"{name if number == 0 else '':<{_FLAG_COLUMN}}{line}".rstrip()


def _name(field: FieldSpec) -> str:
    if field.arg.place != "flag":
        return field.shown
    if field.is_bool:
        return f"--[no-]{field.flag[2:]}" if field.default is True else field.flag
    value = f"[={field.shown}]" if field.arg.bare is not None else f" {field.shown}"
    return field.flag + value


def _default(field: FieldSpec) -> str:
    if field.default is False or field.default in (MISSING, None, "", ()):
        return ""
    return f" (default: {written(field.default, ',' if field.arg.many == 'commas' else ' ')})"


def written(value: object, between: str = " ") -> str:
    """A default in the form that a flag takes."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return between.join(str(part) for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value) or "(empty)"


def _width() -> int:
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns))
