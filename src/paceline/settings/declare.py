"""What a settings dataclass declares, as a table: one row per field.

A settings dataclass is frozen. The name of a field is its flag (`global_batch_size` is `--global-batch-size`) and its
key in files. The docstring under a field is its help. `Annotated` holds its rules: a `Range` and an `Arg`. Commands,
recipes, site profiles and jobs are all declared this way, so parser, help, completion and reference read one table.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin


@dataclass(frozen=True)
class Range:
    """The allowed interval of a number. An open end excludes its bound. No number may be infinite."""

    low: float = float("-inf")
    high: float = float("inf")
    open_low: bool = False
    open_high: bool = False
    or_zero: bool = False  # 0, which switches something off, is allowed besides the interval

    def holds(self, value: float) -> bool:
        if self.or_zero and value == 0:
            return True
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        if self.or_zero:
            return f"0 or {replace(self, or_zero=False)}"
        if self.high == float("inf"):
            return f"greater than {self.low:.12g}" if self.open_low else f"{self.low:.12g} or more"
        low = f"more than {self.low:.12g}" if self.open_low else f"from {self.low:.12g}"
        high = f"less than {self.high:.12g}" if self.open_high else f"up to {self.high:.12g}"
        return f"{low} {high}"


@dataclass(frozen=True)
class Arg:
    """How a field is given. Most fields need none of these options."""

    shown: str = ""  # the value in the help text; for a word, its name
    name: str = ""  # if it differs from the name of the attribute
    allowed: str = ""  # the allowed values in words, if the type does not say it
    aliases: tuple[str, ...] = ()
    # word: without a flag, by its position. rest: everything after --. none: not given by users, but computed.
    place: Literal["flag", "word", "rest", "none"] = "flag"
    # How a tuple is given. spaces: --track a b. commas: --modules a,b, or repeated. lines: repeated, a text each.
    # all: every argument after the flag.
    many: Literal["spaces", "commas", "lines", "all"] = "spaces"
    is_mapping: bool = False  # texts of the form KEY=VALUE; a file may also give a mapping, and Python a dict
    bare: str | None = None  # the value of the flag alone; another value is then given as --flag=value
    bare_unless: tuple[str, ...] = ()  # endings by which the next argument is its value after all
    parse: Callable[[str, Any], Any] | None = None  # of (text, Setting); raises UserError
    completes: Literal["", "recipe", "run", "tag", "file"] = ""
    may_begin_with_dashes: bool = False
    is_secret: bool = False  # error screens do not repeat the value
    in_site: bool = True  # a site profile may hold it


@dataclass(frozen=True)
class FlagsOf:
    """This field collects the flags of another settings dataclass, not yet resolved: other sources may follow."""

    owner: type


@dataclass(frozen=True)
class FieldSpec:
    """One field of a settings dataclass."""

    name: str
    attribute: str  # of the dataclass; usually the same
    owner: type  # the dataclass that the table was made of
    group: str  # of a dataclass with groups, such as Config
    type: Any
    default: Any  # MISSING: it must be given
    help: str
    range: Range | None = None
    arg: Arg = field(default_factory=Arg)

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def aliases(self) -> tuple[str, ...]:
        return self.arg.aliases

    @property
    def is_bool(self) -> bool:
        return self.type is bool

    @property
    def is_tuple(self) -> bool:
        return get_origin(self.type) is tuple

    @property
    def inner(self) -> Any:
        """The type of one value."""
        return get_args(self.type)[0] if self.is_tuple else self.type

    @property
    def is_text(self) -> bool:
        """Free text, or a list of it: nothing to parse."""
        return self.inner is str

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(map(str, get_args(self.inner))) if get_origin(self.inner) is Literal else ()

    @property
    def expects(self) -> str:
        """The allowed values, as text."""
        if self.arg.allowed:
            return self.arg.allowed
        if self.choices:
            return ("any of " if self.is_tuple else "one of ") + ", ".join(self.choices)
        kinds = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path"}
        kind = kinds.get(self.inner, "text")
        return f"{kind}, {self.range}" if self.range else kind

    @property
    def shown(self) -> str:
        """The value in the help text."""
        if self.arg.shown or self.is_bool:
            return self.arg.shown
        if self.arg.place != "flag":
            return self.name.upper()
        return {int: "N", float: "X", Path: "PATH"}.get(self.inner, "|".join(self.choices) or "TEXT")

    def value_in(self, settings: Any) -> Any:
        return getattr(getattr(settings, self.group) if self.group else settings, self.attribute)


_tables: dict[type, dict[str, FieldSpec]] = {}


def fields_of(owner: type) -> dict[str, FieldSpec]:
    """Every field by name, in the order of the help. Fields that are dataclasses are groups of fields."""
    if owner in _tables:
        return _tables[owner]
    table: dict[str, FieldSpec] = {}
    for spec in _specs(owner, owner, ""):
        if spec.name in table:
            raise TypeError(f"two groups of {owner.__name__} have a field named {spec.name}")
        table[spec.name] = spec
    return _tables.setdefault(owner, table)


def collected_by(owner: type) -> dict[str, type]:
    """The fields that collect flags of other dataclasses."""
    hints = typing.get_type_hints(owner, include_extras=True)
    rules = {name: _rule(hint, FlagsOf) for name, hint in hints.items()}
    return {name: rule.owner for name, rule in rules.items() if rule is not None}


def groups_of(owner: type) -> dict[str, str]:
    """The groups of a settings dataclass, each with its description."""
    names = dict.fromkeys(spec.group for spec in fields_of(owner).values())
    return {name: field_docstrings(owner).get(name, "") for name in names}


def _specs(owner: type, part: type, group: str) -> list[FieldSpec]:
    hints = typing.get_type_hints(part, include_extras=True)
    texts = field_docstrings(part)
    specs: list[FieldSpec] = []
    for item in dataclasses.fields(part):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            specs += _specs(owner, hint, item.name)  # type: ignore[arg-type]
            continue
        arg = _rule(hint, Arg) or Arg()
        if arg.place == "none" or _rule(hint, FlagsOf) is not None:
            continue
        kind = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        specs.append(
            FieldSpec(
                name=arg.name or item.name,
                attribute=item.name,
                owner=owner,
                group=group,
                type=_without_none(kind),
                default=item.default,
                help=texts.get(item.name, ""),
                range=_rule(hint, Range),
                arg=arg,
            )
        )
    return specs


def _rule(hint: Any, kind: type) -> Any:
    return next((rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, kind)), None)


def _without_none(kind: Any) -> Any:
    """The type of `X | None` is X: None means that it is not given."""
    if get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    (inner,) = (part for part in get_args(kind) if part is not type(None))
    return inner


def field_docstrings(owner: type) -> dict[str, str]:
    """The text under each field, also of the classes that it inherits from. Python does not keep it."""
    texts: dict[str, str] = {}
    for part in reversed(owner.__mro__):
        texts |= _docstrings(part.__module__).get(part.__name__, {})
    return texts


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    import ast

    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "builtins" or file is None:
        return {}
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts = found.setdefault(node.name, {})
        for item, after in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and is_text:
                texts[item.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return found


Count = Annotated[int, Range(low=0)]
Positive = Annotated[int, Range(low=1)]
NonNegative = Annotated[float, Range(low=0.0)]
Fraction = Annotated[float, Range(low=0.0, high=1.0, open_high=True)]
Probability = Annotated[float, Range(low=0.0, high=1.0)]
Share = Annotated[float, Range(low=0.0, high=1.0, open_low=True)]
Factor = Annotated[float, Range(low=0.0, open_low=True)]
# Of Beta(alpha, alpha). Further out, every weight is 0, 1 or 1/2.
Alpha = Annotated[float, Range(low=0.001, high=100.0, or_zero=True)]
Seconds = Annotated[float, Range(low=0.0, high=1e9)]
