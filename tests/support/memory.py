"""Memory of this process as the operating system counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")


def status_bytes(field: str) -> int:
    """Return a field of the process's status, such as `VmRSS` (resident) or `VmHWM` (peak)."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


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
