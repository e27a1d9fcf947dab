"""The memory that this process may still take, as the kernel has it."""

from __future__ import annotations

import re
from pathlib import Path

from vlora.cores import CGROUPS, PROCESS, tightest_limit

MEMINFO = Path("/proc/meminfo")


def available_bytes(
    meminfo: Path = MEMINFO, process: Path = PROCESS, root: Path = CGROUPS
) -> int | None:
    """Bytes: what the machine has left and the tightest control group allows; None if unknown."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    machine = None if found is None else int(found[1]) * 1024
    group = tightest_limit(_version_2, "memory", _version_1, process, root)
    known = [int(value) for value in (machine, group) if value is not None]
    return min(known, default=None)


def _version_2(folder: Path) -> float | None:
    """`memory.max` holds bytes, or "max"."""
    return _left(folder, "memory.max", "memory.current", "inactive_file")


def _version_1(folder: Path) -> float | None:
    """`memory.limit_in_bytes` is enormous where there is none."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return _left(folder, *names)


def _left(folder: Path, limit: str, used: str, cache: str) -> float | None:
    """Files that nobody has used lately are dropped before anything is refused."""
    try:
        allowed = int((folder / limit).read_text())
        current = int((folder / used).read_text())
        found = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return max(1, allowed - current + (int(found[1]) if found else 0))
