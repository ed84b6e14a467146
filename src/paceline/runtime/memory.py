"""Memory of this process: what the C library does with freed memory, and when Python searches for garbage."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_ALL = 2**31 - 1
_MOST = 32 * 2**20  # the maximum of glibc; larger blocks are always returned to the kernel
_MANY = 100_000  # objects: collecting them later would be a noticeable pause in training


def keep_freed_memory() -> None:
    """Keep freed memory from now on. Needs glibc; otherwise does nothing.

    A CPU step frees and reallocates the same memory. If glibc returns it to the kernel in between, every step pays
    thousands of page faults. Whether glibc does so depends on the layout of the heap.
    """
    options = getattr(ctypes.CDLL(None), "mallopt", None)
    if options is not None:
        options(_MMAP_THRESHOLD, _MOST)
        options(_TRIM_THRESHOLD, _ALL)


def return_freed_memory() -> None:
    """Return freed memory once, after large temporary allocations. Takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def no_search_for_garbage() -> Iterator[None]:
    """For code that makes many lasting objects. Collects once at the end if there are many.

    The collector traverses young objects whenever enough new ones exist. Loading and running torch's compiler makes
    hundreds of thousands of objects that stay: a quarter of that time is spent on traversing them repeatedly.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY:
            gc.collect()
        if was_enabled:
            gc.enable()
