"""Errors as a person at a Python prompt should see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import PacelineError


@contextmanager
def explained() -> Iterator[None]:
    """A traceback ends with the whole screen - where, got, allowed, try - and not only with what is wrong."""
    try:
        yield
    except PacelineError as error:
        rest = error.screen().partition("\n")[2]
        if rest and rest not in getattr(error, "__notes__", ()):
            error.add_note(rest)
        raise
