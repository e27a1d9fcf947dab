"""Memory that was freed stays with the process: the next step needs as much.

Else glibc gives results of some MiB back to the system when they are dropped, and the next layer's
first write to each page of them traps: some thousand times a layer in a prefill (decision 59).
"""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt."""
LARGEST = 32 << 20
"""Bytes from which on a block is the system's and goes back to it; glibc takes no more."""
KEPT = 2 * LARGEST
"""Bytes at the heap's end that are kept. Both are where glibc's own rule, which follows what is
freed, ends; here from the start, and for good."""


def keep() -> None:
    """For this process; what the user has set stays. Nothing where the C library lacks it."""
    if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGEST)
        mallopt(TRIM_THRESHOLD, KEPT)
