"""Memory that this process can still allocate, as the kernel reports it."""

from __future__ import annotations

import re
from pathlib import Path

from vlora.cores import CGROUPS, PROCESS, tightest_limit

MEMINFO = Path("/proc/meminfo")


def available_bytes(
    meminfo: Path = MEMINFO, process: Path = PROCESS, root: Path = CGROUPS
) -> int | None:
    """Return the smaller of the machine's available memory and what the tightest control group
    leaves, in bytes; None if neither is known."""
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        match = None
    machine = None if match is None else int(match[1]) * 1024
    group = tightest_limit(_version_2, "memory", _version_1, process, root)
    limits = [int(value) for value in (machine, group) if value is not None]
    return min(limits, default=None)


def _version_2(folder: Path) -> float | None:
    """Return the bytes left in a group of control groups version 2, or None without a limit
    (`memory.max` is "max")."""
    return _bytes_left(folder, "memory.max", "memory.current", "inactive_file")


def _version_1(folder: Path) -> float | None:
    """Return the bytes left in a group of version 1; without a limit it reports a huge number."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return _bytes_left(folder, *names)


def _bytes_left(folder: Path, limit: str, usage: str, inactive: str) -> float | None:
    """Return limit - usage, plus inactive file pages, which the kernel drops before an allocation
    fails; None if there is no limit."""
    try:
        allowed = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    match = re.search(rf"^{inactive} (\d+)$", stat, re.MULTILINE)
    return max(1, allowed - used + (int(match[1]) if match else 0))
