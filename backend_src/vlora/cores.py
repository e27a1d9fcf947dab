"""The cores that this process may use, and how the engine and the vision encoder share them."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from vlora.config import AUTO, IntOrAuto, Options

log = logging.getLogger(__name__)

# Number of cores per thread of the encoder, which has less than a quarter of the work.
CORES_PER_ENCODER_THREAD = 4
CGROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self/cgroup")


class Split(NamedTuple):
    """Number of threads of the engine's process and of the encoder's process."""

    engine: int
    encoder: int


def usable_cores(affinity: int, quota: float | None) -> int:
    """Return the number of threads for the cores of the affinity mask and of the quota, rounded.

    With more threads, the process would use up its quota early in a period, and then stop.
    """
    if quota is None:
        return max(1, affinity)
    return max(1, min(affinity, math.floor(quota + 0.5)))


def split_cores(
    cores: int, engine: IntOrAuto = AUTO, encoder: IntOrAuto = AUTO, *, by_quota: bool = False
) -> Split:
    """Return the number of threads of engine and encoder; those that are not "auto" are unchanged.

    The encoder gets one thread per CORES_PER_ENCODER_THREAD cores, the engine one for each core,
    because its threads take work in small pieces (decision 33). With a quota, the engine gets only
    the rest of the cores, or the two would use up the quota early and stop.
    """
    for_encoder = max(1, cores // CORES_PER_ENCODER_THREAD) if encoder == AUTO else encoder
    for_engine = max(1, cores - for_encoder) if by_quota else cores
    return Split(for_engine if engine == AUTO else engine, for_encoder)


def split_threads(options: Options) -> Split:
    """Return the numbers of threads of the two processes on this machine, and log them."""
    affinity, quota = len(os.sched_getaffinity(0)), cpu_quota()
    cores = usable_cores(affinity, quota)
    # A quota of all cores or more is no limit.
    by_quota = quota is not None and cores < affinity
    split = split_cores(cores, options.engine_threads, options.encoder_threads, by_quota=by_quota)
    log.info(
        "threads: %d for the engine, %d for the encoder (%d cores%s)",
        *split,
        affinity,
        "" if quota is None else f", of which the container may use {quota:g}",
    )
    return split


def cpu_quota(process: Path = PROCESS, root: Path = CGROUPS) -> float | None:
    """Return the smallest CPU quota of this process's control groups, in cores, if there is one."""
    return tightest_limit(_version_2, "cpu", _version_1, process, root)


# Function that reads a limit from the folder of a control group; None if the group has no limit.
Reader = Callable[[Path], float | None]


def tightest_limit(
    version_2: Reader,
    controller: str,
    version_1: Reader,
    process: Path = PROCESS,
    root: Path = CGROUPS,
) -> float | None:
    """Return the smallest limit that this process's control groups set; None if they set none.

    version_2, version_1: read the limit of a group, by the version of control groups.
    controller: name of the controller in version 1.
    """
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return None
    limits: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _limits(root, path, version_2)
            limits += _limits(root / "unified", path, version_2)
        elif controller in controllers.split(","):
            limits += _limits(root / controllers, path, version_1)
            limits += _limits(root / controller, path, version_1)
    return min(limits, default=None)


def _limits(root: Path, path: str, read: Reader) -> Iterator[float]:
    """Yield the limits of a group and of all that contain it; of `root` in a container."""
    relative = PurePosixPath(path.lstrip("/") or ".")
    for folder in (relative, *relative.parents):
        limit = read(root / folder)
        if limit is not None and limit > 0:
            yield limit


def _version_2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _version_1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 else None
