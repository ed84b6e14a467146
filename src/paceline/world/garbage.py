"""Python's search for garbage, kept away from where it takes time and finds none.

It looks at all younger objects whenever enough new ones have been made. Loading and running torch's compiler makes
hundreds of thousands that stay: a quarter of that time goes into looking at them again and again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 100_000  # objects: a search among them takes long enough to be noticed in the middle of training


@contextmanager
def no_search_for_garbage() -> Iterator[None]:
    """For building what stays. What was made is looked at once, at the end, if it is much."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY:
            gc.collect()
        if was_enabled:
            gc.enable()
