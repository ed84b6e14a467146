"""The parser of the command line: arguments become settings with their origin.

`--flag value`, `--flag=value`, `--switch`, `--no-switch`, aliases, words by their position, repeated flags, and
everything after `--`. What is allowed is in the table that `declare.py` makes of a settings dataclass.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, TypeVar

from paceline.errors import UserError
from paceline.settings.declare import FieldSpec, collected_by, fields_of, groups_of
from paceline.settings.values import Setting, as_typed, build, check_texts, find_in, split_commas, unknown_name

T = TypeVar("T")
COMMAND_LINE = "the command line"
_WIDEST, _NARROWEST = 118, 60
_FLAG_COLUMN = 30


def parse_command(arguments: Sequence[str], owner: type[T], command: str) -> T:
    """The settings of a command. Fields that collect flags of other dataclasses get them as settings."""
    table: dict[str, FieldSpec] = {}
    for other in collected_by(owner).values():
        table |= fields_of(other)
    table |= fields_of(owner)
    settings = parse_arguments(arguments, table, command)
    own = [setting for setting in settings if setting.field.owner is owner]
    collected = {
        name: tuple(setting for setting in settings if setting.field.owner is other)
        for name, other in collected_by(owner).items()
    }
    try:
        return build(owner, own, **collected)
    except UserError as error:
        if error.what.endswith(" is missing") and error.where is None:
            error.where, error.hint = COMMAND_LINE, usage(owner, command)
        raise


def parse_arguments(arguments: Sequence[str], table: Mapping[str, FieldSpec], command: str) -> list[Setting]:
    """Split arguments into settings. Values are converted later, when every source is known."""
    flags = {name: field for name, field in table.items() if field.arg.place == "flag"}
    places = [field for field in table.values() if field.arg.place == "word"]
    settings: dict[str, Setting] = {}
    left = list(arguments)
    while left:
        token = left.pop(0)
        field = places[0] if places else None
        if field is not None and field.arg.many == "all":
            values, left = [token, *left], []
        elif token == "--" and (rest := _rest(table)) is not None:
            field, values, left = rest, left, []
        elif token.startswith("-") and token != "-":
            field, values = _read_flag(token, left, flags, command)
        elif field is None:
            raise _unexpected(token, table, command)
        else:
            values = [token]
        if field.arg.place == "word" and not field.is_tuple:
            places.pop(0)
        before = settings.pop(field.name, None)
        adds = field.is_tuple and (field.arg.place == "word" or field.arg.many in ("commas", "lines"))
        earlier = before.values if before is not None and adds else ()
        where = f"flag {field.flag}" if field.arg.place == "flag" else COMMAND_LINE
        settings[field.name] = check_texts(Setting(field, (*earlier, *values), "flag", where))
    return list(settings.values())


def _rest(table: Mapping[str, FieldSpec]) -> FieldSpec | None:
    return next((field for field in table.values() if field.arg.place == "rest"), None)


def _read_flag(
    token: str, left: list[str], flags: Mapping[str, FieldSpec], command: str
) -> tuple[FieldSpec, list[str]]:
    """The field of a flag, and its values: after =, or from the arguments that are left."""
    name, has_value, value = token.removeprefix("--").partition("=")
    field = find_in(flags, name) if token.startswith("--") else None
    is_negated = False
    if field is None and name.startswith("no-"):
        field = find_in(flags, name.removeprefix("no-"))
        is_negated = field is not None and field.is_bool
    if field is None or (name.startswith("no-") and not is_negated and find_in(flags, name) is None):
        raise unknown_name(token.partition("=")[0], COMMAND_LINE, flags, command)
    if field.is_bool:
        if has_value:
            hint = f"{field.flag} or {field.flag.replace('--', '--no-', 1)}"
            raise UserError(f"{field.flag} takes no value", where=COMMAND_LINE, got=token, hint=hint)
        return field, ["false" if is_negated else "true"]
    if has_value:
        if not value and field.arg.bare is not None:
            raise UserError(f"{field.flag} needs a value after =", where=COMMAND_LINE, got=token)
        return field, _split(field, value)
    if field.arg.bare is not None:
        takes_next = bool(left) and bool(field.arg.bare_unless) and left[0].endswith(field.arg.bare_unless)
        return field, [left.pop(0)] if takes_next else [field.arg.bare]
    if field.arg.many == "all":
        values, left[:] = list(left), []
        return field, values
    return field, _take_values(field, left)


def _take_values(field: FieldSpec, left: list[str]) -> list[str]:
    takes_many = field.is_tuple and field.arg.many == "spaces"
    values: list[str] = []
    while left and (takes_many or not values):
        if left[0].startswith("--") and not field.arg.may_begin_with_dashes:
            break
        values += _split(field, left.pop(0))
    if not values and not takes_many:
        allowed = field.help or field.expects if field.expects == "text" else field.expects
        raise UserError(f"{field.flag} needs a value", where=COMMAND_LINE, allowed=allowed)
    return values


def _split(field: FieldSpec, text: str) -> list[str]:
    """In most fields a comma is part of the value."""
    return split_commas(text) if field.is_tuple and field.arg.many == "commas" else [text]


def _unexpected(token: str, table: Mapping[str, FieldSpec], command: str) -> UserError:
    words = [field.shown for field in table.values() if field.arg.place == "word"]
    allowed = f"{' and '.join(words)} and flags" if words else "flags, which start with --"
    return UserError(
        f"unexpected argument {token!r}", where=COMMAND_LINE, allowed=allowed, hint=f"paceline {command} --help"
    )


def arguments_of(settings: Any, without: Sequence[str] = ()) -> list[str]:
    """The arguments that give the same settings again. Defaults are left out."""
    arguments: list[str] = []
    for name, field in fields_of(type(settings)).items():
        value = field.value_in(settings)
        if field.arg.place != "flag" or name in without or value == field.default:
            continue
        if value == field.arg.bare:
            arguments.append(field.flag)
        elif field.is_tuple and field.arg.many == "commas":
            arguments.append(f"{field.flag}={','.join(map(str, value))}")
        else:
            arguments += Setting(field, as_typed(value), "flag", COMMAND_LINE).tokens()
    return arguments


def usage(owner: type, command: str) -> str:
    """`paceline status RUN [flags]`."""
    parts = [f"paceline {command}"]
    fields = list(fields_of(owner).values())
    for field in fields:
        if field.arg.place == "word":
            name = f"{field.shown}..." if field.is_tuple else field.shown
            parts.append(name if field.default is MISSING else f"[{name}]")
        elif field.arg.place == "flag" and field.default is MISSING:
            parts.append(f"{field.flag} {field.shown}")
    has_flags = any(field.arg.place == "flag" for field in fields) or collected_by(owner)
    parts += ["[flags]"] if has_flags else []
    parts += [f"[-- {field.shown}]" for field in fields if field.arg.place == "rest"]
    return " ".join(parts)


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
