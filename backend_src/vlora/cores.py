"""The cores this process may use, and how the engine and the vision encoder share them.

Affinity and a container's quota both count. What decides is pure (`usable`, `share`); the rest asks
the kernel. Knows nothing of torch.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from vlora.config import AUTO, Options, Threads

log = logging.getLogger(__name__)

ENCODER_PART = 4
"""The encoder gets one core in so many: a tower's work beside its decoder's is less than that."""
CGROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self/cgroup")


class Split(NamedTuple):
    """Threads of the engine's process and of the encoder's."""

    engine: int
    encoder: int


def usable(affinity: int, quota: float | None) -> int:
    """Threads for `affinity` cores under a quota of so many cores' time (None: no quota).

    Half a core and more counts as one, less as none: a team of threads that together run out of
    quota stands still until the period ends, all of it.
    """
    if quota is None:
        return max(1, affinity)
    return max(1, min(affinity, math.floor(quota + 0.5)))


def share(
    cores: int, engine: Threads = AUTO, encoder: Threads = AUTO, *, by_quota: bool = False
) -> Split:
    """Threads of engine and encoder on `cores` cores; a number that is given is kept.

    The encoder gets a part of them, at least one. The engine gets all: its work is taken in pieces,
    so that a core which the encoder has for a while costs that core alone (decision 33). Where
    the number is a quota (`by_quota`) it gets the rest: two teams that together run out of it stand
    still until its period ends.
    """
    beside = max(1, cores // ENCODER_PART) if encoder == AUTO else encoder
    rest = max(1, cores - beside) if by_quota else cores
    return Split(rest if engine == AUTO else engine, beside)


def of(options: Options) -> Split:
    """The threads of the two processes on this machine, logged."""
    affinity, quota = len(os.sched_getaffinity(0)), cpu_quota()
    cores = usable(affinity, quota)
    # A quota of all cores takes nothing from anyone.
    by_quota = quota is not None and cores < affinity
    found = share(cores, options.engine_threads, options.encoder_threads, by_quota=by_quota)
    log.info(
        "threads: %d for the engine, %d for the encoder (%d cores%s)",
        *found,
        affinity,
        "" if quota is None else f", of which the container may use {quota:g}",
    )
    return found


def cpu_quota(process: Path = PROCESS, root: Path = CGROUPS) -> float | None:
    """Cores' worth of time that the tightest control group above this process allows, or None."""
    return least(_version_2, "cpu", _version_1, process, root)


Reader = Callable[[Path], float | None]
"""What the folder of a control group allows; None where it says nothing."""


def least(
    version_2: Reader,
    controller: str,
    version_1: Reader,
    process: Path = PROCESS,
    root: Path = CGROUPS,
) -> float | None:
    """The least that the control groups above this process allow of something, or None."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return None
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _limits(root, path, version_2)
            found += _limits(root / "unified", path, version_2)
        elif controller in controllers.split(","):
            found += _limits(root / controllers, path, version_1)
            found += _limits(root / controller, path, version_1)
    return min(found, default=None)


def _limits(root: Path, path: str, read: Reader) -> Iterator[float]:
    """Limits of a group and of all above it. In a container the path may be the host's, which is
    not to be seen from inside; the root then is the container's own."""
    for folder in _upwards(path):
        limit = read(root / folder)
        if limit is not None and limit > 0:
            yield limit


def _upwards(path: str) -> Iterable[str]:
    relative = PurePosixPath(path.lstrip("/") or ".")
    return [str(folder) for folder in (relative, *relative.parents)]


def _version_2(folder: Path) -> float | None:
    """`cpu.max` holds "quota period" in µs, or "max period"."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _version_1(folder: Path) -> float | None:
    """`cpu.cfs_quota_us` is −1 where there is none."""
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
