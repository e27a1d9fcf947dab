"""Sizes that Linux states of a process."""

from __future__ import annotations

from pathlib import Path


def status_bytes(field: str, pid: int | str = "self") -> int:
    """Return a field of a process's status, such as `VmRSS` (resident) or `VmHWM` (its peak)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
