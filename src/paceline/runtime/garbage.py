"""Suspends Python's garbage collector where it takes time and finds nothing.

The collector traverses young objects whenever enough new ones exist. Loading and running torch's compiler makes
hundreds of thousands of objects that stay: a quarter of that time is spent on traversing them repeatedly.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 100_000  # objects: collecting them later would be a noticeable pause in training


@contextmanager
def no_search_for_garbage() -> Iterator[None]:
    """For code that makes many lasting objects. Collects once at the end if there are many."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY:
            gc.collect()
        if was_enabled:
            gc.enable()
