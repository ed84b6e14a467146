"""JSON files of a run folder, with the types that their readers expect.

The files may come from another machine, another version or another person. `settings/small_files.py` limits size,
depth and numbers. `fit` keeps the members that have the expected type and drops the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.settings.small_files import LARGEST_JSON_BYTES, parse_json, read_small

LARGEST_LINES_BYTES = 1 << 30  # enough for months of metrics; only complete lines are parsed


@dataclass(frozen=True)
class Fields:
    """An object: members it must have, members it may have, and what all others must be (None: anything)."""

    required: dict[str, Any] = field(default_factory=dict)
    optional: dict[str, Any] = field(default_factory=dict)
    others: Any = None


Shape = Fields | tuple[Fields, ...] | None


@dataclass(frozen=True)
class ListOf:
    """A list of values of one kind. An item that does not fit is dropped, or makes the list invalid."""

    items: Any
    drops: bool = False


@dataclass(frozen=True)
class MapOf:
    """An object with any names and values of one kind."""

    values: Any


@dataclass(frozen=True)
class Number:
    """A finite number within bounds."""

    low: float = -1e300
    high: float = 1e300
    is_whole: bool = False


@dataclass(frozen=True)
class Word:
    """One of a few texts."""

    allowed: tuple[str, ...]


COUNT = Number(0, 2**53, is_whole=True)  # the largest integer that JavaScript keeps exactly
SHARE = Number(0, 1)
MAYBE = type(None)  # for pairs such as (COUNT, MAYBE)


def read_bounded(path: Path, at_most_bytes: int = LARGEST_JSON_BYTES) -> bytes:
    """Read a file of a run folder. Raises OSError or ValueError if it is not a regular file, or too large."""
    return read_small(path, at_most_bytes, follows_links=False)


def read_object(path: Path, shape: Shape = None) -> dict[str, Any]:
    """The object in a small file of a run; empty if the file is missing or invalid."""
    try:
        content = parse_json(read_bounded(path))
        return fit(content, shape or _ANYTHING)  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}


def read_objects(path: Path, shape: Shape = None) -> list[dict[str, Any]]:
    """The objects of a file with one object per line. A line that a crash has cut off is left out."""
    try:
        content = read_bounded(path, LARGEST_LINES_BYTES)
    except (OSError, ValueError):
        return []
    return list(parse_lines(content, shape))


def parse_lines(content: bytes, shape: Shape = None) -> Iterator[dict[str, Any]]:
    for line in content.splitlines():
        try:
            yield fit(parse_json(line), shape or _ANYTHING)
        except ValueError:
            continue


def fit(value: Any, shape: Any) -> Any:
    """The value without members that do not fit. Raises ValueError if the value itself does not fit.

    A shape is a type, a tuple of alternative shapes, Number, Word, Fields, ListOf or MapOf. float accepts whole numbers
    and NaN, too. Only bool accepts True. None accepts anything.
    """
    if shape is None:
        return value
    if isinstance(shape, Fields):
        return _fit_object(value, shape)
    if isinstance(shape, ListOf):
        return list(_fit_items(_of_type(value, list), shape))
    if isinstance(shape, MapOf):
        return {name: fit(item, shape.values) for name, item in _of_type(value, dict).items()}
    if isinstance(shape, tuple):
        return _fit_one_of(value, shape)
    if isinstance(shape, Number):
        return _fit_number(value, shape)
    if isinstance(shape, Word):
        return _fit_word(value, shape)
    return _of_type(value, shape)


def _fit_object(value: Any, shape: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {}
    missing = shape.required.keys() - _of_type(value, dict).keys()
    if missing:
        raise ValueError(f"{min(missing)} is missing")
    for name, item in value.items():
        wanted = shape.required.get(name, shape.optional.get(name, shape.others))
        try:
            found[name] = fit(item, wanted)
        except ValueError:
            if name in shape.required:
                raise
    return found


def _fit_items(items: list[Any], shape: ListOf) -> Iterator[Any]:
    for item in items:
        try:
            yield fit(item, shape.items)
        except ValueError:
            if not shape.drops:
                raise


def _fit_number(value: Any, shape: Number) -> float:
    kinds = (int,) if shape.is_whole else (int, float)
    if type(value) not in kinds or not shape.low <= value <= shape.high:  # a NaN is within no bounds
        raise ValueError("not a number within its bounds")
    return value  # type: ignore[no-any-return]


def _fit_word(value: Any, shape: Word) -> str:
    if not isinstance(value, str) or value not in shape.allowed:
        raise ValueError(f"not one of {', '.join(shape.allowed)}")
    return value


def _fit_one_of(value: Any, shapes: tuple[Any, ...]) -> Any:
    for shape in shapes:
        try:
            return fit(value, shape)
        except ValueError:
            continue
    raise ValueError("it is of another type")


def _of_type(value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        return value
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


_ANYTHING = Fields()
