"""What the C library does with memory that was freed.

glibc's way is to give it back to the system by rules that suit programs which do not need it again. A training step
on a CPU needs tomorrow what it frees today: given back in between, it costs thousands of page faults per step, or none,
as the heap happens to lie.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_ALL = 2**31 - 1
_MOST = 32 * 2**20  # glibc takes no more; what is larger is the system's every time


def keep_freed_memory() -> None:
    """From now on, where the C library is one that can (glibc)."""
    options = getattr(ctypes.CDLL(None), "mallopt", None)
    if options is not None:
        options(_MMAP_THRESHOLD, _MOST)
        options(_TRIM_THRESHOLD, _ALL)


def return_freed_memory() -> None:
    """Once, after something large that will not be needed again. Takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
