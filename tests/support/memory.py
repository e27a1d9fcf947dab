"""Memory of this process as the operating system counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import status_bytes


def resident_bytes(field: str = "VmRSS") -> int:
    """Return the resident memory after all unused memory has been returned to the system.

    field: `RssAnon` leaves out the code of libraries, which becomes resident on use.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status_bytes(field)


def peak_growth(function: Callable[[], object]) -> int:
    """Call a function. Return its peak resident memory minus that before the call, in bytes."""
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    function()
    return status_bytes("VmHWM") - before
