"""Controls what the C library does with freed memory.

A CPU step frees and reallocates the same memory. If glibc returns it to the kernel in between, every step pays
thousands of page faults. Whether glibc does so depends on the layout of the heap.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_ALL = 2**31 - 1
_MOST = 32 * 2**20  # the maximum of glibc; larger blocks are always returned to the kernel


def keep_freed_memory() -> None:
    """Keep freed memory from now on. Needs glibc; otherwise does nothing."""
    options = getattr(ctypes.CDLL(None), "mallopt", None)
    if options is not None:
        options(_MMAP_THRESHOLD, _MOST)
        options(_TRIM_THRESHOLD, _ALL)


def return_freed_memory() -> None:
    """Return freed memory once, after large temporary allocations. Takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
