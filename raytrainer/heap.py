"""How the C library keeps memory between steps, which decides a good part of a CPU model's speed."""

from __future__ import annotations

import ctypes
import os
import platform

# The names and numbers of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_THRESHOLD_BYTES, _MMAP_THRESHOLD_BYTES = 2**30, 256 * 2**20


def keep_freed_memory() -> bool:
    """Has glibc keep what one step frees for the next, instead of giving it back to the system each time.

    By default it depends on how the heap happens to lie whether every step takes its memory anew: with a
    small convolutional network none or 2,000 page faults a step, the latter for a quarter of its CPU time.
    Blocks of more than 256 MiB are still given back at once. Returns whether it was done: not where the
    environment sets glibc's malloc itself, and not with another C library.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    done = [
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES),
    ]
    return done == [1, 1]
