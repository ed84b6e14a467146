"""Training samples in settings: which are left out (`exclude`), and which get another label (`relabel`).

A setting may name a file. The file is read when the settings are loaded, and its content becomes the value: a run and
its checkpoints hold the samples themselves, so they do not depend on a file that may change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from paceline.errors import UserError
from paceline.settings.small_files import read_small

_INLINE = re.compile(r"[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*")
_INLINE_LABELS = re.compile(r"[0-9]+=[^,=]+(,[0-9]+=[^,=]+)*")
_LARGEST_BYTES = 100_000  # config.yaml holds the samples
_MOST_SAMPLES = 1_000_000


def read_excluded(value: str, where: str) -> str:
    """Sample numbers in their shortest form, for example 3,17,20-29. `value`: the same, or a file of numbers."""
    if not value:
        return ""
    text = value if _INLINE.fullmatch(value) else ",".join(_read_words(value, where))
    return shorten(excluded_ids(text, where)) or _refuse_nothing(value, where)


def read_relabelled(value: str, where: str) -> str:
    """Numbers and labels, for example 3=circle,17=0. `value`: the same, or a file with SAMPLE,LABEL lines."""
    if not value:
        return ""
    if not _INLINE_LABELS.fullmatch(value):
        lines = [line.strip() for line in _read_text(value, where).splitlines() if line.strip()]
        value = ",".join("=".join(part.strip() for part in line.split(",", 1)) for line in lines)
    labels = new_labels(value, where)
    return join_labels(labels) or _refuse_nothing(value, where)


def excluded_ids(text: str, where: str = "exclude") -> list[int]:
    """The numbers in a value of `exclude`, ascending."""
    ids: set[int] = set()
    for part in filter(None, text.split(",")):
        if not _INLINE.fullmatch(part):
            raise _unreadable(part, where)
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not 0 < len(numbers) <= _MOST_SAMPLES:
            raise _unreadable(part, where)
        ids.update(numbers)
    return sorted(ids)


def new_labels(text: str, where: str = "relabel") -> dict[int, str]:
    """The label of each number in a value of `relabel`."""
    labels: dict[int, str] = {}
    for part in filter(None, text.split(",")):
        if not _INLINE_LABELS.fullmatch(part):
            raise _unreadable(part, where, "SAMPLE=LABEL, or a file with SAMPLE,LABEL lines")
        sample, _, label = part.partition("=")
        if labels.setdefault(int(sample), label) != label:
            raise UserError("a sample has two labels", where=where, got=f"{int(sample)}={labels[int(sample)]}, {part}")
    return labels


def join_labels(labels: dict[int, str]) -> str:
    """Numbers and labels as text."""
    return ",".join(f"{sample}={label}" for sample, label in sorted(labels.items()))


def shorten(ids: Iterable[int]) -> str:
    """Numbers as text, with ranges."""
    parts: list[list[int]] = []
    for number in sorted(set(ids)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _read_words(name: str, where: str) -> list[str]:
    return _read_text(name, where).replace(",", " ").split()


def _read_text(name: str, where: str) -> str:
    try:
        return read_small(Path(name), _LARGEST_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            "the samples cannot be read",
            where=where,
            got=f"{name}: {reason}",
            allowed=f"numbers such as 3,17,20-29, or a text file with them of up to {_LARGEST_BYTES:,} bytes",
        ) from error


def _refuse_nothing(value: str, where: str) -> NoReturn:
    raise UserError("this names no sample", where=where, got=f"{value[:60]}, which is empty")


def _unreadable(part: str, where: str, allowed: str = "") -> UserError:
    allowed = allowed or "numbers such as 3,17,20-29, or a text file with them"
    return UserError("this does not name a sample", where=where, got=part[:60], allowed=allowed)
