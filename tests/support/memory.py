"""Memory of this process, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")


def status_bytes(field: str) -> int:
    """Return a field of the process's status: `VmRSS` (resident), or `VmHWM` (its peak)."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def resident_bytes(field: str = "VmRSS") -> int:
    """Return the resident memory after everything that is not used has been given back.

    field: `RssAnon` does not count the code of libraries, which becomes resident as it is used.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status_bytes(field)


def peak_growth(function: Callable[[], object]) -> int:
    """Return by how many bytes the resident memory exceeded its present size during a call."""
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    function()
    return status_bytes("VmHWM") - before
