"""Complete error messages for users of the Python API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import PacelineError


@contextmanager
def explained() -> Iterator[None]:
    """Make the exception text the whole error screen: what, where, got, allowed, try."""
    try:
        yield
    except PacelineError as error:
        rest = error.screen().partition("\n")[2]
        if rest and rest not in getattr(error, "__notes__", ()):
            error.add_note(rest)
        raise
