"""Processes by id, told apart from later ones that got the same id by their start time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class ProcessId(NamedTuple):
    """started: clock ticks since boot, from /proc."""

    pid: int
    started: int


def children(pid: int) -> set[ProcessId]:
    """The direct children of `pid` that are alive."""
    found: set[int] = set()
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found.update(int(child) for child in listing.read_text().split())
    return {known for child in found if (known := identify(child)) is not None}


def identify(pid: int) -> ProcessId | None:
    """The process that has this id now, or None (also for one that has ended already)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else ProcessId(pid, int(fields[19]))


def end(processes: Iterable[ProcessId], grace_seconds: float = 2.0) -> None:
    """Give the processes a moment to leave by themselves, then kill those still alive."""
    deadline = time.monotonic() + grace_seconds
    alive = {process for process in processes if identify(process.pid) == process}
    while alive and time.monotonic() < deadline:
        time.sleep(0.05)
        alive = {process for process in alive if identify(process.pid) == process}
    for process in alive:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
