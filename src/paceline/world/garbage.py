"""Python's search for garbage, kept away from where it takes time and finds none.

It looks at all younger objects whenever enough new ones have been made. Loading and running torch's compiler makes
hundreds of thousands that stay: a quarter of that time goes into looking at them again and again, and a search later,
in the middle of training, stops it for tenths of a second.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_search_for_garbage() -> Iterator[None]:
    """For building what stays. One search at the end; later ones leave alone whatever there is then."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        throw_away_garbage()
        gc.freeze()
        if was_enabled:
            gc.enable()


def throw_away_garbage() -> None:
    """What only a circle of references holds: a tensor in one keeps all that it was computed from."""
    gc.collect(1)  # the oldest have been looked at twice, and looking at all of torch takes tenths of a second
